"""What a manifest says, for people: a summary for the terminal, and the part of DELIVERY.md that is made from it."""

from pathlib import Path
from typing import Any

from samebits.evidence import receipt
from samebits.image.delivery import IMAGE
from samebits.image.plan import load_image
from samebits.sources.pins import load_pins
from samebits.sources.prs import branch

SIGNED = (
    "The digest is the one that I pulled, and `samebits deliver verify` passed with `--signers`.",
    "The commit named here is the one that I read, and it was clean.",
    "Every upstream release and commit is one that I accept as a base.",
    "The patches are those of the three pull requests, and I read them.",
    "The default arm (`VLLM_BATCH_INVARIANT=0`) is what the releases do.",
    "Each receipt that I rely on was judged again by `samebits judge`.",
    "What was measured outside of the image is marked so, and shares the wheels that are named.",
    "The baseline was confirmed by a person (C1).",
    "The recipe was confirmed by a person (C9).",
    "What is not covered is acceptable for what I use this for.",
)


def summary(document: dict[str, Any]) -> str:
    """A manifest in a screen."""
    image, source = document["image"], document["source"]
    what = "a delivery" if not document["lacking"] else f"no delivery: {document['lacking']}"
    lines = [f"{image['digest']}  {document['profile']}, {what}", f"commit {source['git_commit']}, clean"]
    sizes = [sum(layer[key] for layer in image["layers"]) / 1e9 for key in ("size", "unpacked")]
    lines.append(f"{sizes[0]:.1f} GB, {sizes[1]:.1f} GB unpacked")
    for layer in image["layers"]:
        size = f"{layer['size'] / 1e6:7.0f} MB of {layer['unpacked'] / 1e6:7.0f}"
        lines.append(f"layer {layer['name']:13} {size}  {layer['digest'][:19]}  {len(layer['parts'])} files went in")
    for key, said in document["upstreams"].items():
        lines.append(f"{key} {said['bases'][0]}: {len(said['patches'])} patches, {len(said['files'])} files")
    inside = sum(row["inside"] for row in document["evidence"])
    shared = sum(not row["inside"] and bool(row["wheels"]) for row in document["evidence"])
    lines.append(
        f"evidence: {inside} measured in it, {shared} outside with wheels of it, {len(document['evidence'])} in all"
    )
    for name, said in document["confirmations"].items():
        lines.append(f"{name}: {f'{said["by"]}, {said["date"]}: {said["what"]}' if said else 'not confirmed'}")
    return "\n".join(lines)


def newest(root: Path) -> dict[str, Any] | None:
    """The delivery's manifest: the one that manifests/delivery/newest names; None if nothing was delivered."""
    name = root / "manifests" / "delivery" / "newest"
    return IMAGE.read(name.with_name(name.read_text().strip() + ".json")) if name.is_file() else None


def render(root: Path) -> str:
    """The generated part of DELIVERY.md."""
    document, pins = newest(root), load_pins(root / "manifests" / "upstreams.toml")
    lines = ["## The image", ""]
    if document is None:
        reason = (
            load_image(root).lacking["gpu"] or "no image of a clean commit was recorded (`samebits deliver record`)"
        )
        lines += [f"Nothing has been delivered yet: {reason}.", ""]
    else:
        lines += ["```", summary(document), "```", ""]
        lines += [
            f"It is the image of commit `{document['source']['git_commit']}`, and of no later one: what was committed"
        ]
        lines += [
            "after it is delivered when an image is built of it and recorded. A checkout of that commit builds this"
        ]
        lines += ["digest again, and is what `--checkout` below asks for (`git worktree add ../delivered COMMIT`).", ""]
    lines += [
        "Pull it by its digest, then verify what was pulled:",
        "",
        "```",
        "skopeo copy --preserve-digests docker://REGISTRY/samebits@sha256:... oci:LAYOUT",
        "samebits deliver verify LAYOUT --signers allowed_signers --checkout ../delivered",
        "```",
        "",
        "`image.json`, `image.json.sig`, `sbom.json` and `listings/` are copied into LAYOUT beside it.",
        "",
        "## The pull requests",
        "",
        "| upstream | branch | starts from | series |",
        "|---|---|---|---|",
    ]
    for upstream in pins.patched():
        patches = sorted(path.name for path in (root / "patches" / upstream.key).glob("*") if path.is_dir())
        if upstream.branch:
            target = f"{upstream.repository.removeprefix('https://github.com/')}:{upstream.branch}"
            lines.append(f"| {target} | `{branch(upstream.key)}` | `{upstream.commit[:12]}` | {', '.join(patches)} |")
    lines += ["", "Made by `scripts/open_prs.sh`.", "", "## What a reviewer signs", ""]
    lines += [f"{number}. {line}" for number, line in enumerate(SIGNED, 1)]
    return "\n".join(lines) + "\n"


def evidence_lines(root: Path) -> list[str]:
    """What a pull request's text says was measured: each committed receipt with its counts."""
    lines = []
    for path in sorted((root / "manifests" / "evidence").rglob("receipt.json")):
        document = receipt.read(path)
        counts = [(c["mismatched"], c["valid_tokens"]) for c in document["compares"]]
        differ, of = (sum(column) for column in zip(*counts, strict=True))
        name = path.relative_to(root).as_posix()
        lines.append(
            f"BI={document['arm']}, {document['execution']['device']}: {differ:,} of {of:,} logprobs differ over "
            f"{len(counts)} comparisons; verdict {document['verdict']} (`{name}` of the samebits repository)"
        )
    return lines
