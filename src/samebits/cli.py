"""The command line: a few verbs, each a thin call into one room.

What a command needs is imported inside of it, so that --help is quick and works without the engines. A further room
adds its typer app by one `app.add_typer(...)` line. Exit codes: 0 done, 1 an error or a failed check, 2 wrong usage.
"""

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from typer.core import TyperGroup

from samebits.errors import SamebitsError
from samebits.sources.pins import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from samebits.evidence.document import Kind
    from samebits.recipe.warm_start import WarmStart
    from samebits.report.tables import Figure
    from samebits.sources.patching import Patch, Read
    from samebits.sources.pins import Base, Pins, Upstream

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class _Group(TyperGroup):
    """The one place where an error that a person can act on becomes a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SamebitsError as error:
            message = str(error)
        except OSError as error:
            # A path that a person named: everything else that can fail on a disk is a SamebitsError already.
            message = f"{error.filename}: {error.strerror}; name another path" if error.filename else str(error)
        err.print(f"error: {message}", style="red", markup=False)
        raise typer.Exit(1)


def _typer(text: str, **options: Any) -> typer.Typer:
    return typer.Typer(help=text, no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", **options)


app = _typer("Make the policy that is trained and the policy that is served produce the same bits.", cls=_Group)
sources = _typer("Pinned upstream releases: fetch them, verify them.")
build = _typer("Build what is installed.")
patch = _typer("The patch series: check, export, apply.")
run = _typer("Run the recipe through verl's own trainer.")
check = _typer("Check what is claimed.")
bench = _typer("Measure both arms, side by side.")
app.add_typer(sources, name="sources")
app.add_typer(build, name="build")
app.add_typer(patch, name="patch")
app.add_typer(run, name="run")
app.add_typer(check, name="check")
app.add_typer(bench, name="bench")
image_app = _typer("What an image is made of.")
deliver = _typer("An image's manifest, and the pull requests.")
app.add_typer(image_app, name="image")
app.add_typer(deliver, name="deliver")

PATCHES, RECORDS, SERIES = ROOT / "patches", ROOT / "manifests" / "patched", ROOT / "build" / "series"


class Profile(StrEnum):
    """Which machines a set of wheels is for."""

    cpu = "cpu"
    gpu = "gpu"


class Claim(StrEnum):
    """What a receipt claims."""

    observe = "observe"
    zero = "zero"


class Device(StrEnum):
    """Where the engines of a check run."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Of activations and weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class _Named(Protocol):
    @property
    def file(self) -> str: ...


@contextmanager
def _bar(total: int, doing: str) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A progress bar of `total` steps: what changes its text, and what to call with each step that is done.

    Nothing is drawn where nobody looks.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda text: progress.update(task, description=text), lambda: progress.advance(task)


def _progress[T: _Named](items: Iterable[T], doing: str) -> Iterator[T]:
    """Yield the items under a progress bar that names the one at work."""
    todo = list(items)
    with _bar(len(todo), doing) as (show, step):
        for item in todo:
            show(f"{doing} {item.file}")
            yield item
            step()


@sources.command("fetch")
def sources_fetch() -> None:
    """Fetch every release that carries patches into the cache, by name, version and sha256.

    Example: `SAMEBITS_CACHE=/data/cache samebits sources fetch`
    """
    from samebits.sources.fetch import cache_folder, fetch
    from samebits.sources.pins import load_pins

    for artefact in _progress([a for a in load_pins().by_file.values() if a.base], "fetching"):
        out.print(f"{fetch(artefact).relative_to(cache_folder())}")


@sources.command("verify")
def sources_verify() -> None:
    """Fetch the releases, verify their hashes, and compare the Python sources of those that must be the same.

    Example: `samebits sources verify`
    """
    from samebits.sources.compare import differences
    from samebits.sources.fetch import fetch
    from samebits.sources.pins import load_pins

    pins = load_pins()
    for artefact in _progress([a for a in pins.by_file.values() if a.base], "verifying"):
        fetch(artefact)
        out.print(f"{artefact.file}: sha256 as pinned")
    failed = False
    for same in _progress(pins.same, "comparing"):
        found = differences(fetch(pins.by_file[same.file]), fetch(pins.by_file[same.reference]), same)
        for difference in found:
            err.print(f"error: {same.file}: {difference}", style="red", markup=False)
        failed = failed or bool(found)
        if not found:
            out.print(f"{same.file}: Python sources as in {same.reference}, but for the recorded ones")
    if failed:
        err.print("Remedy: read the difference; if it is harmless, list it under [[same]] in manifests/upstreams.toml.")
        raise typer.Exit(1)


@build.command("wheels")
def build_wheels(
    profile: Annotated[Profile, typer.Option(help="cpu: the laptop and CI; gpu: what the image ships")] = Profile.cpu,
    folder: Annotated[Path | None, typer.Option("--out", help="where to; default build/wheels/PROFILE")] = None,
) -> None:
    """Rebuild the pinned release wheels with the patch series in them, byte for byte the same each time.

    Beside them stands a requirements.txt with their hashes.

    Example: `samebits build wheels --profile cpu --out build/wheels/cpu`
    """
    from samebits.sources.pins import load_pins
    from samebits.sources.wheels import artefacts_of, build_profile

    pins, python = load_pins(), sys.version_info[:2]
    target = folder or ROOT / "build" / "wheels" / profile
    bar = _progress([artefact for _, artefact in artefacts_of(pins, profile, python)], "building")
    for _, wheel in zip(bar, build_profile(pins, profile, python, PATCHES, target), strict=True):
        touched = f"{len(wheel.changes)} files changed"
        out.print(f"{wheel.path.name}  {touched}  sha256 {wheel.sha256}")
    out.print(f"install: uv pip install --no-deps --no-index --find-links {target} -r {target / 'requirements.txt'}")


@build.command("image")
def build_image(
    profile: Annotated[
        Profile, typer.Option(help="cpu: for tests and CI, no delivery; gpu: the delivery")
    ] = Profile.cpu,
    folder: Annotated[Path | None, typer.Option("--out", help="the OCI layout; default build/image/PROFILE")] = None,
) -> None:
    """Compose the image from the locks, the pins and the committed sources. Its digest is the last line.

    A layer that is unchanged is not made again. Needs mmdebstrap, and a mirror or a filled cache.

    Example: `samebits build image --profile cpu --out build/image/cpu`
    """
    from samebits.image.compose import compose
    from samebits.sources.fetch import cache_folder

    with _phases() as say:
        digest = compose(ROOT, profile, folder or ROOT / "build" / "image" / profile, cache_folder(), say)
    out.print(digest)


@image_app.command("lock")
def image_lock() -> None:
    """Make image/debian.lock, cpu.lock and gpu.lock anew: the mirror's packages now, and the wheels of manifests/locks.

    Example: `DEBIAN_MIRROR=file:/srv/debian samebits image lock`
    """
    from samebits.image.locking import lock

    with err.status("locking"):
        lock(ROOT)


Layout = Annotated[Path, typer.Argument(metavar="LAYOUT", help="the folder of `samebits build image`")]


@deliver.command("show")
def deliver_show(layout: Layout) -> None:
    """Say what an image is: digest, layers, sources, evidence, confirmations.

    Example: `samebits deliver show build/image/cpu`
    """
    from samebits.image.delivery import IMAGE, MANIFEST
    from samebits.image.rendering import summary

    out.print(summary(IMAGE.read(layout / MANIFEST)), markup=False)


@deliver.command("verify")
def deliver_verify(
    layout: Layout,
    signers: Annotated[
        Path | None, typer.Option(help="OpenSSH's allowed_signers: one of them must have signed the manifest")
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="ask for no signature")] = False,
    checkout: Annotated[
        Path | None, typer.Option(help="a checkout that has the commit and the evidence; default: none is compared")
    ] = None,
) -> None:
    """Derive again all that the manifest says of an image, from the image; the first difference is named.

    Without a signature that is asked for, or `--unsigned`, nothing is verified. Exit code 1 if anything differs.

    Examples: `samebits deliver verify build/image/cpu --unsigned`,
    `samebits deliver verify LAYOUT --signers allowed_signers --checkout .`
    """
    from samebits.image.delivery import check_signature
    from samebits.image.verify import verify

    if (signers is None) != unsigned:
        raise typer.BadParameter("give --signers FILE, or --unsigned", param_hint="--signers")
    who = check_signature(layout, signers) if signers else "nobody, as asked"
    with err.status("verifying"):
        document = verify(layout, checkout)
    out.print(f"{document['image']['digest']}: as its manifest says; signed by {who}", markup=False)


@deliver.command("sign")
def deliver_sign(
    layout: Layout, key: Annotated[Path, typer.Option(help="an OpenSSH key; its public half if an agent holds it")]
) -> None:
    """Sign an image's manifest with OpenSSH: LAYOUT/image.json.sig.

    Example: `samebits deliver sign build/image/gpu --key ~/.ssh/id_ed25519`
    """
    from samebits.image.delivery import sign

    out.print(str(sign(layout, key)), markup=False)


@deliver.command("record")
def deliver_record(layout: Layout) -> None:
    """Verify an image, then put its manifest below manifests/delivery, and what it says into DELIVERY.md: to commit.

    Example: `samebits deliver record build/image/gpu`
    """
    from samebits.image.verify import record

    with err.status("verifying"):
        path = record(layout, ROOT)
    out.print(str(path), markup=False)
    deliver_render(ROOT / "DELIVERY.md")


@deliver.command("render")
def deliver_render(
    document: Annotated[Path, typer.Option("--into", help="the Markdown file with the markers")] = ROOT / "DELIVERY.md",
) -> None:
    """Write what the newest manifest under manifests/delivery says between the markers of DELIVERY.md.

    Example: `samebits deliver render`
    """
    from samebits.image.rendering import render
    from samebits.report import insert_block

    insert_block(document, "delivery", render(ROOT))
    out.print(str(document), markup=False)


@deliver.command("prs")
def deliver_prs(
    source: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="UPSTREAM=REPOSITORY", help="fetch a target from there; repeat for more"),
    ] = None,
    remote: Annotated[
        str | None, typer.Option("--push", metavar="REMOTE", help="push each branch to REMOTE/NAME, with lease")
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="with --push: open drafts with gh, or renew their text")
    ] = False,
) -> None:
    """Make the three pull requests below build/prs: a branch on each target's head, git am files, a bundle, the text.

    Without options nothing else is changed. Running it again makes the same branches.

    Examples: `samebits deliver prs`, `samebits deliver prs --push git@github.com:ME --create`
    """
    from samebits.image.rendering import evidence_lines
    from samebits.sources import prs
    from samebits.sources.pins import load_pins

    if create and not remote:
        raise typer.BadParameter("give --push REMOTE with it", param_hint="--create")
    if create:
        prs.check_gh()
    pins, sources = load_pins(), _pairs(source, "--from")
    if unknown := sorted(set(sources) - {upstream.key for upstream in pins.patched() if upstream.branch}):
        raise typer.BadParameter(f"{unknown[0]} is no upstream with a pull request", param_hint="--from")
    with err.status("preparing"):
        requests = prs.prepare(pins, PATCHES, RECORDS, ROOT / "build" / "prs", sources, evidence_lines(ROOT))
    for made in requests:
        out.print(
            f"{made.upstream.key}: {made.branch} {made.head} on {made.upstream.branch} {made.target}", markup=False
        )
        if made.drift:
            err.print(f"warning: {made.drift} is not as recorded there; --push will refuse", markup=False)
    if remote:
        for line in prs.push(requests, remote, pins.commit):
            out.print(line, markup=False)
    if remote and create:
        for line in prs.create(requests, remote):
            out.print(line, markup=False)


@build.command("tree")
def build_tree(
    folder: Annotated[Path, typer.Option("--out", help="a new folder")],
    through: Annotated[str | None, typer.Option(help="the last patch of vllm's series that it has")] = None,
    trainer: Annotated[bool, typer.Option("--trainer", help="also of megatron-core and verl")] = False,
) -> None:
    """Write the files in which the GPU's patched vllm differs from its release: lay them over an unpacked release.

    `bench engine --arm NAME=BI@FOLDER` takes such a folder, and says of which wheel it is.

    Examples: `samebits build tree --out build/tree`, `samebits build tree --through 0004-admitted-linear --out first`
    """
    from samebits.sources.fetch import cache_folder
    from samebits.sources.pins import load_pins
    from samebits.sources.tree import write_tree

    with err.status("building"):
        wheel = write_tree(load_pins(), PATCHES, cache_folder(), folder, through, trainer)
    out.print(f"{folder}: of {wheel}", markup=False)


Checkouts = Annotated[
    list[Path] | None, typer.Option("--checkout", help="a git checkout that holds a pinned commit; repeat for more")
]


@patch.command("check")
def patch_check(
    checkout: Checkouts = None,
    record: Annotated[bool, typer.Option("--record", help="write manifests/patched instead of comparing")] = False,
) -> None:
    """Prove every edit on every base at hand: it applies, and each touched file is as recorded, before and after.

    Released wheels are fetched. A base that is a commit needs a checkout; without one it is printed as missing, and its
    committed record must be of the present patches.

    Examples: `samebits patch check`, `samebits patch check --checkout ../verl --checkout ../Megatron-LM --record`
    """
    from samebits.sources.pins import load_pins

    pins = load_pins()
    checkouts = _match(pins, checkout or [])
    missing = failed = 0
    for upstream in pins.patched():
        for base in upstream.base:
            try:
                checked = _check(upstream, base, checkouts, record)
            except SamebitsError as error:
                failed += 1
                err.print(f"error: {error}", style="red", markup=False)
            else:
                missing += not checked
    if missing:
        out.print(f"{missing} bases are missing: they were not checked here.")
    if failed:
        err.print(f"{failed} bases failed.")
        raise typer.Exit(1)


def _check(upstream: "Upstream", base: "Base", checkouts: dict[str, Path], record: bool) -> bool:
    """Check one base from all of its sources at hand; False if there are none and only its record was checked."""
    from samebits.sources import records

    at_hand = 0
    for at_hand, (name, read) in enumerate(_reads(upstream, base, checkouts), 1):
        changes = records.prove(read, upstream, base, PATCHES)
        if record and at_hand == 1:
            records.write(RECORDS, upstream, base, PATCHES, changes)
        records.verify(changes, records.load(RECORDS, upstream, base, PATCHES), upstream, base)
        state = "recorded" if record else "as recorded"
        out.print(f"[green]ok[/]       {upstream.key} {base.name}  {name}  {len(changes)} files, {state}")
    if not at_hand:
        records.load(RECORDS, upstream, base, PATCHES)
        state = "not at hand (--checkout); its record is of these patches"
        out.print(f"[yellow]missing[/]  {upstream.key} {base.name} {base.commit[:12]}  {state}")
    return bool(at_hand)


@patch.command("export")
def patch_export(
    base: Annotated[list[str] | None, typer.Option(help="UPSTREAM/BASE, e.g. verl/main; default: all at hand")] = None,
    checkout: Checkouts = None,
) -> None:
    """Write the series as `git am` files to build/series/UPSTREAM/BASE, one a patch folder.

    They carry the upstream's context lines: never commit them. A release's series leaves out what its wheel leaves out,
    such as the upstream's tests.

    Example: `samebits patch export --base verl/main --checkout ../verl`
    """
    from samebits.sources.pins import load_pins

    pins = load_pins()
    checkouts = _match(pins, checkout or [])
    wanted = dict.fromkeys(base or [f"{u.key}/{b.name}" for u in pins.patched() for b in u.base])
    for upstream in pins.patched():
        for one in upstream.base:
            if f"{upstream.key}/{one.name}" in wanted:
                wanted.pop(f"{upstream.key}/{one.name}")
                files = _export(pins, upstream, one, checkouts)
                if files is None:
                    out.print(
                        f"[yellow]missing[/]  {upstream.key} {one.name}  no checkout of it was given (--checkout)"
                    )
                    if base:
                        raise typer.Exit(1)
                else:
                    out.print(f"{SERIES.relative_to(ROOT) / upstream.key / one.name}  {len(files)} patches")
    if wanted:
        raise typer.BadParameter(f"unknown: {', '.join(wanted)}", param_hint="--base")


@patch.command("apply")
def patch_apply(
    checkout: Annotated[Path, typer.Argument(help="a git checkout that holds a pinned commit")],
    worktree: Annotated[Path, typer.Argument(help="the new work tree")],
    branch: Annotated[str, typer.Option(help="the new branch")] = "samebits",
) -> None:
    """Put the series onto a pinned commit as commits on a new branch, in a new work tree beside the checkout's own.

    Example: `samebits patch apply ../verl ../verl-samebits --branch samebits`
    """
    from samebits.sources import records, series
    from samebits.sources.pins import load_pins

    pins = load_pins()
    for upstream, base in records.match_checkout(pins, checkout):
        files = _export(pins, upstream, base, {base.commit: checkout}) or []
        series.apply_to_checkout(checkout, base.commit, branch, files, pins.commit, worktree)
        out.print(f"{worktree}: {upstream.key} {base.commit[:12]} and {len(files)} commits on branch {branch}")


@patch.command("hashes")
def patch_hashes(
    file: Annotated[Path, typer.Argument(help="a source file of the upstream")],
    symbol: Annotated[str, typer.Argument(help="class, function or Class.method")],
) -> None:
    """List the statements of a symbol with the sha256 that a `replace` edit records (and that of each header).

    Example: `samebits patch hashes ../verl/verl/utils/device.py get_device_name`
    """
    from samebits.sources.patching import list_statements

    for line, digest, header, text in list_statements(file.read_text("utf-8"), symbol):
        out.print(f"{line:5}  {digest}  {text}", markup=False)
        if header:
            out.print(f"{'':7}{header}  its header", markup=False)


Steps = Annotated[
    int, typer.Option(min=1, help="optimizer steps; 3 compare θ0, θ1 and θ2, and with fewer no verdict is a pass")
]
Replace = Annotated[bool, typer.Option("--replace", help="remove a run that is over from its folder first")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a Hydra override; repeat for more")
]
Warm = Annotated[
    list[str] | None,
    typer.Option(
        "--warm-start",
        metavar="KEY=VALUE",
        help="seed, layers, hidden, head, ffn, vocabulary or steps of the warm start; repeat for more",
    ),
]


RecipeDevice = Annotated[Device, typer.Option("--device", help="where trainer and rollout run")]
Geometry = Annotated[str | None, typer.Option("--model", help="a real model's geometry: qwen3-1.7b")]


def _described(device: Device, geometry: str | None, warm_start: list[str] | None) -> "WarmStart":
    """The warm start that the options describe: the device's, or a geometry's, but for the --warm-start settings."""
    from samebits.recipe.warm_start import MODELS, STANDARD, WarmStart

    if geometry is not None and geometry not in MODELS:
        raise typer.BadParameter(f"give one of {', '.join(MODELS)}", param_hint="--model")
    standard = MODELS[geometry] if geometry else STANDARD[str(device)]
    return WarmStart.described(_pairs(warm_start, "--warm-start"), standard)


@run.command("loop")
def run_loop(
    folder: Annotated[Path, typer.Option("--out", help="where OUT/bi0, OUT/bi1 and OUT/report.html go")],
    steps: Steps = 3,
    replace: Replace = False,
    settings: Settings = None,
    warm_start: Warm = None,
    device: RecipeDevice = Device.cpu,
    geometry: Geometry = None,
) -> None:
    """Run the RL recipe as arm 0, then as arm 1, on this machine; one page shows both.

    Exit code 0 if arm 0 was observed and arm 1 is zero, 1 otherwise; the page is drawn in either case.

    Examples: `samebits run loop --out build/loop --replace`, `samebits run loop --out build/one --warm-start seed=1`
    """
    from samebits.judge import summary
    from samebits.recipe import launch

    overrides = _pairs(settings, "--set")
    model = _described(device, geometry, warm_start)
    with _saying() as say:
        receipts = launch.run_loop(steps, folder, overrides, model, say, replace, str(device))
    for receipt in receipts:
        out.print(f"BI={receipt['arm']}  {summary(receipt)}", markup=False)
    out.print(f"report: {folder / 'report.html'}", markup=False)
    if any(receipt["verdict"] != "pass" for receipt in receipts):
        raise typer.Exit(1)


@run.command("rl")
def run_rl(
    arm: Annotated[int, typer.Option(help="0: vLLM and Megatron as they are; 1: batch invariant")],
    folder: Annotated[Path, typer.Option("--out", help="a new folder for capsules, logs and the receipt")],
    steps: Steps = 3,
    page: Annotated[Path | None, typer.Option("--report", help="where the page goes; default OUT/report.html")] = None,
    replace: Replace = False,
    settings: Settings = None,
    warm_start: Warm = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would run, and start nothing")] = False,
    device: RecipeDevice = Device.cpu,
    geometry: Geometry = None,
) -> None:
    """Run the RL recipe on this machine and judge it: the receipt is OUT/receipt.json, the page OUT/report.html.

    Exit code 0 for the verdict pass, 1 for any other; the page is drawn in either case.

    Examples: `samebits run rl --arm 1 --out build/loop/bi1`,
    `samebits run rl --arm 0 --out build/small --set data.train_batch_size=8 --warm-start steps=60`
    """
    from samebits.judge import summary
    from samebits.recipe import launch

    overrides = _pairs(settings, "--set")
    model = _described(device, geometry, warm_start)
    if dry_run:
        planned = launch.plan(arm, steps, overrides, model, str(device))
        out.print(f"configuration: sha256 {planned.config_sha256}", markup=False)
        out.print(f"command: {shlex.join(planned.command)}", markup=False)
        return
    page = page or folder / "report.html"
    with _saying() as say:
        receipt = launch.run_rl(arm, steps, folder, overrides, model, say, replace, page, str(device))
    out.print(f"report: {page}", markup=False)
    _verdict(receipt, summary(receipt))


@run.command("sft")
def run_sft(
    folder: Annotated[Path, typer.Option("--out", help="a new folder for the page, sft.json and the log")],
    steps: Annotated[int, typer.Option(min=1, help="of each arm; with fewer than 40 no verdict is a pass")] = 40,
    layers: Annotated[int, typer.Option(min=1, help="of the seeded Qwen3")] = 2,
    hidden: Annotated[int, typer.Option(min=128, help="a multiple of 128")] = 1024,
) -> None:
    """Train three arms on one task, data and order: under test, gradient reference, native baseline.

    Layer 3 of the backward's validation, on the CPU: first one step beside FP64, then the curves. What a difference is
    due to is said by rules that were fixed before. Exit code 0 for the verdict pass, 1 for any other.

    Example: `samebits run sft --out build/sft`
    """
    from samebits.probe import sft

    with _phases() as say:
        document = sft.check(steps, layers, hidden, folder, say)
    _page(folder / "sft.html", "Layer 3: three arms of a supervised run", sft.tables(document), sft.notes(document))
    if document["verdict"] != "pass":
        raise typer.Exit(1)


@contextmanager
def _saying() -> Iterator[Callable[[str], None]]:
    """Says each phase of a run as it comes, and shows the present one where somebody looks."""
    with err.status("starting") as status:

        def say(phase: str) -> None:
            status.update(phase)
            err.print(phase, markup=False)

        yield say


@check.command("bits")
def check_bits(
    folder: Annotated[Path, typer.Option("--out", help="a new folder for recordings, logs and invariance.json")],
    arm: Annotated[list[int] | None, typer.Option(help="0 or 1; repeat for both; default: both")] = None,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="repeat for both; default: all that the device has")] = None,
    device: Annotated[Device, typer.Option(help="where the engines run")] = Device.cpu,
    layers: Annotated[int, typer.Option(min=1, help="of the seeded Qwen3")] = 6,
    hidden: Annotated[int, typer.Option(min=128, help="a multiple of 128")] = 1024,
    quick: Annotated[bool, typer.Option("--quick", help="fewer and shorter cells, eager only: two minutes")] = False,
    localise: Annotated[
        bool, typer.Option("--localise", help="name the first layer and operator of each arm and dtype that differs")
    ] = False,
) -> None:
    """Ask a running engine the same in many ways (batch, prefill, cache, threads, order) and compare the bits.

    The table says mismatched of compared logprobs, a row a cell. OUT/invariance.json is the matrix with its verdict;
    `samebits judge` judges it again. Exit code 1 if BI=1 has a mismatch, or a cell is incomplete or did not take place.

    Examples: `samebits check bits --out build/bits`, `samebits check bits --arm 0 --quick --out build/quick`
    """
    from samebits.judge import matrix_summary
    from samebits.probe import invariance, traces
    from samebits.probe.device import DTYPES

    asked = invariance.Asked(
        arms=tuple(dict.fromkeys(arm or (0, 1))),
        dtypes=tuple(dict.fromkeys(map(str, dtype or DTYPES[device]))),
        device=device,
        layers=layers,
        hidden=hidden,
        quick=quick,
    )
    with _bar(invariance.steps(asked), "starting") as (show, step):

        def say(phase: str) -> None:
            show(phase)
            err.print(phase, markup=False)

        document = invariance.check(asked, folder, say, step)
    _print_matrix(document)
    if localise:
        for cell in invariance.to_localise(document):
            named, where = traces.of_cell(asked, cell, folder, lambda text: err.print(text, markup=False))
            said = named.text() if named else "both runs agree when they are traced"
            out.print(f"arm{cell['arm']}-{cell['dtype']}: {cell['cell']}: {said}; {where}", markup=False)
    _verdict(document, matrix_summary(document))


@check.command("localise")
def check_localise(
    folder: Annotated[Path, typer.Option("--out", help="a new folder for traces and the replay")],
    weights: Annotated[
        list[Path] | None, typer.Option(help="a model folder; twice for two sides; default: a seeded Qwen3")
    ] = None,
    arm: Annotated[list[int] | None, typer.Option(help="0 or 1; twice for two sides")] = None,
    dtype: Annotated[Dtype, typer.Option(help="of activations and weights")] = Dtype.bfloat16,
    device: Annotated[Device, typer.Option(help="where the engines run")] = Device.cpu,
    layers: Annotated[int, typer.Option(min=1, help="of the seeded Qwen3")] = 6,
    hidden: Annotated[int, typer.Option(min=128, help="of the seeded Qwen3, a multiple of 128")] = 1024,
) -> None:
    """Compare two runs operator by operator on the same tokens, and name the first layer and operator that differ.

    Two sides are two weight folders or two arms. The operator's inputs are kept: `samebits check replay` runs it again.
    Exit code 1 if the sides differ.

    Example: `samebits check localise --weights MODEL --arm 0 --arm 1 --out build/arms`
    """
    from samebits.probe import traces

    sides = weights or [traces.model_folder(folder, layers, hidden)]
    left, right_side = traces.two_sides(sides, arm or [0], dtype, device)
    named = traces.between(left, right_side, folder, lambda text: err.print(text, markup=False))
    out.print(named.text() if named else "no operator differs, and no weight", markup=False)
    if named:
        if (folder / "replay").is_dir():
            out.print(f"replay: samebits check replay {folder / 'replay' / 'left'} {folder / 'replay' / 'right'}")
        raise typer.Exit(1)


@check.command("planted")
def check_planted(
    folder: Annotated[Path, typer.Option("--out", help="a new folder for traces, logs and planted.json")],
    arm: Annotated[list[int] | None, typer.Option(help="0 or 1; repeat for both; default: both")] = None,
    seeds: Annotated[
        str, typer.Option(metavar="FROM:TO", help="a fault is drawn from each; TO is left out")
    ] = "100:120",
    dtype: Annotated[Dtype, typer.Option(help="of activations and weights")] = Dtype.bfloat16,
    device: Annotated[Device, typer.Option(help="where the engine runs")] = Device.cpu,
    layers: Annotated[int, typer.Option(min=1, help="of the seeded Qwen3")] = 6,
    hidden: Annotated[int, typer.Option(min=128, help="a multiple of 128")] = 1024,
) -> None:
    """Try `check localise` on planted faults: each must be named, and the unchanged run beside it accused of nothing.

    Each seed flips a bit of a weight, the last bit of an operator's output, or changes a norm's epsilon, at a random
    layer. OUT/planted.json says what was planted and what was named. Exit code 1 if a fault is not named, an unchanged
    run is accused, or a seed takes more than a minute.

    Example: `samebits check planted --out build/planted`
    """
    from samebits.judge import missed_faults
    from samebits.probe import traces

    first, _, end = seeds.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise typer.BadParameter(f"{seeds} is not FROM:TO", param_hint="--seeds")
    tried = tuple(dict.fromkeys(arm or (0, 1)))
    with _phases() as say:
        document = traces.try_planted(range(int(first), int(end)), tried, folder, dtype, device, (layers, hidden), say)
    for name, of_arm in document["arms"].items():
        for row in of_arm["seeds"]:
            state = "[green]named[/]" if row["right"] else "[red]missed[/]"
            truth, named = row["truth"], row["named"]
            said = f"{named['module']}: {named['operator']}" if named else "nothing"
            where = f"{truth['what']}, {truth['module']}: {truth['operator']}"
            out.print(f"{state}  BI={name}, seed {row['seed']}, {row['seconds']} s: {where}; named: {said}")
    out.print(str(folder / "planted.json"), markup=False)
    if wrong := missed_faults(document, None):
        err.print(f"error: not what it must be: {'; '.join(wrong)}", style="red", markup=False)
        raise typer.Exit(1)


@check.command("gradients")
def check_gradients(
    folder: Annotated[Path, typer.Option("--out", help="a new folder for the page, gradients.json and the log")],
    seeds: Annotated[int, typer.Option(min=1, help="of random inputs; more are more of the same")] = 3,
) -> None:
    """Compare each module's gradients with an independent FP64 reference, and try the comparison on planted faults.

    Layer 1 of the backward's validation, on the CPU: the aligned functions and modules of Megatron Core, a model in
    training with its one-step updates, and hand-written modules, right and wrong. Exit code 1 if a gradient is wrong, a
    fault is not named by module and tensor, or something was not asked.

    Example: `samebits check gradients --out build/gradients`
    """
    from samebits.judge.gradients import missed
    from samebits.probe import gradients

    with _phases() as say:
        document = gradients.check(seeds, folder, say)
    notes = [f"not covered: {text}" for text in document["not_covered"]]
    _page(folder / "gradients.html", "Layer 1: gradients of modules", gradients.tables(document), notes)
    if wrong := missed(document, None):
        err.print(f"error: not what it must be: {'; '.join(wrong)}", style="red", markup=False)
        raise typer.Exit(1)


@check.command("conventions")
def check_conventions(
    folder: Annotated[Path, typer.Option("--out", help="a new folder for the page, conventions.json and the log")],
    steps: Annotated[int, typer.Option(min=0, help="that the checkpoint has taken")] = 20,
    layers: Annotated[int, typer.Option(min=1, help="of the model")] = 4,
) -> None:
    """Compare dX and dW of every quantized layer under two conventions: of what the forward used, and of the master.

    Layer 2 of the backward's validation, on the CPU, for each combination of weight and activation formats. The page
    says cosine and ratio of norms by class and layer, and lists outliers.

    Example: `samebits check conventions --out build/conventions`
    """
    from samebits.judge.conventions import missed
    from samebits.probe import conventions

    with _phases() as say:
        document = conventions.check(steps, layers, folder, say)
    notes = ["by itself: of one layer, both with one cotangent; the rest is of the whole backward"]
    _page(folder / "conventions.html", "Layer 2: conventions of the gradient", conventions.tables(document), notes)
    if wrong := missed(document):
        err.print(f"error: not what it must be: {'; '.join(wrong)}", style="red", markup=False)
        raise typer.Exit(1)


@check.command("replay")
def check_replay(
    folders: Annotated[list[Path], typer.Argument(metavar="REPLAY...", help="OUT/replay/left or right of localise")],
    arm: Annotated[int, typer.Option(help="0 or 1")] = 0,
    device: Annotated[Device, typer.Option(help="where the operator runs")] = Device.cpu,
) -> None:
    """Run a kept operator again on its recorded inputs, and count the output elements that are not the recorded ones.

    Exit code 1 if any is not: the fault is then not in the operator's inputs.

    Example: `samebits check replay build/arms/replay/left build/arms/replay/right`
    """
    from samebits.probe import traces

    rows = traces.replay(folders, arm, device)
    for row in rows:
        out.print(f"{row['folder']}: {row['operator']}: {row['differ']} of {row['elements']} elements differ")
    if any(row["differ"] for row in rows):
        raise typer.Exit(1)


def _page(path: Path, title: str, tables: "list[Table]", notes: list[str], figures: "Sequence[Figure]" = ()) -> None:
    """Print tables and notes, and write them to a page, below its figures."""
    from samebits.report.tables import WIDTH, write_page

    write_page(path, title, tables, notes, figures)
    wide = Console(width=max(out.width, WIDTH))
    for table in tables:
        wide.print(table)
    for note in notes:
        out.print(note, markup=False)
    out.print(str(path), markup=False)


def _print_matrix(document: dict[str, Any]) -> None:
    """The matrix as a table: cells down, arms and dtypes across."""
    from rich.table import Table

    from samebits.judge import matrix_rows

    head, rows = matrix_rows(document)
    table = Table(title="logprobs that differ", title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        # The zero of a row is what one looks for: a mismatch is coloured, in either arm.
        cells = [text if not i or text.startswith("0 of ") else f"[yellow]{text}[/]" for i, text in enumerate(row)]
        table.add_row(*cells)
    out.print(table)


def _pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """KEY=VALUE texts as a table, in their order."""
    pairs = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{text} is not KEY=VALUE", param_hint=option)
        if key in pairs:
            raise typer.BadParameter(f"{key} is given twice", param_hint=option)
        pairs[key] = value
    return pairs


@app.command("judge")
def judge_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run, or a receipt.json")],
    claim: Annotated[
        Claim | None, typer.Option(help="observe: complete, finite, within the bound; zero: and no mismatch")
    ] = None,
) -> None:
    """Judge a run from its capsules, or a receipt again from its own counts. The claim is the arm's if none is given.

    An invariance.json of `samebits check bits` is judged again too. Exit code 0 for the verdict pass, 1 for any other.

    Examples: `samebits judge build/loop/bi0`, `samebits judge manifests/evidence/cpu/bi0/receipt.json`
    """
    from samebits.evidence import invariance, provenance, receipt
    from samebits.judge import judge_run, matrix_summary, read_bounds, rejudge, rejudge_matrix, summary
    from samebits.recipe import arms, launch

    if folder.name == "invariance.json":
        matrix = invariance.KIND.read(folder)
        rejudge_matrix(matrix)
        _print_matrix(matrix)
        _verdict(matrix, matrix_summary(matrix))
        return
    bounds = read_bounds(launch.BOUNDS)
    if folder.is_dir():
        if (folder / "receipt.json").is_file() and not (folder / "capsules").is_dir():
            raise SamebitsError(f"{folder} holds a receipt and no capsules: judge {folder / 'receipt.json'}")
        arm = provenance.read(folder / "execution.json")["arm"]
        found = judge_run(folder, claim or arms.CLAIM[arm], bounds)
    else:
        found = receipt.read(folder)
        rejudge(found, claim or arms.CLAIM.get(found["arm"]), bounds)
    _verdict(found, summary(found))


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="one run, or one of each arm")],
    page: Annotated[Path, typer.Option("--out", help="the page to write")] = Path("build/report.html"),
    picture: Annotated[Path | None, typer.Option("--svg", help="also the mismatch charts alone, as a picture")] = None,
    readme: Annotated[
        Path | None, typer.Option("--table", help="also write the mismatch table into this Markdown file")
    ] = None,
    evidence: Annotated[
        Path | None,
        typer.Option("--evidence", help="with --table: also what FOLDER's cpu and h200 hold besides the runs"),
    ] = None,
) -> None:
    """Draw one self-contained HTML page of one or two runs.

    `--table` replaces what stands between the file's two markers, `<!-- mismatches -->` and `<!-- /mismatches -->`;
    with `--evidence` also between those of `measured` (FOLDER/cpu: invariance, planted and bench.json) and of `card`
    (FOLDER/h200: gemm, operators, invariance and engines-*.json).

    Examples: `samebits report build/loop/bi0 build/loop/bi1 --out build/loop/report.html`,
    `samebits report manifests/evidence/cpu/bi0 manifests/evidence/cpu/bi1 --svg docs/report.svg --table README.md`
    """
    from samebits.report import insert_block, render, render_card, render_measured, render_svg_summary, render_table

    if evidence is not None and readme is None:
        raise typer.BadParameter("give --table with it: the file to write into", param_hint="--evidence")
    render(runs, page)
    out.print(str(page), markup=False)
    if picture is not None:
        picture.write_text(render_svg_summary(runs), encoding="utf-8")
        out.print(str(picture), markup=False)
    if readme is not None:
        insert_block(readme, "mismatches", render_table(runs))
        if evidence is not None:
            insert_block(readme, "measured", render_measured(evidence / "cpu"))
            insert_block(readme, "card", render_card(evidence / "h200"))
        out.print(str(readme), markup=False)


@check.command("contract")
def check_contract(
    write: Annotated[
        bool, typer.Option("--write", help="make the document's tables anew instead of comparing")
    ] = False,
) -> None:
    """Compare both contracts under docs/, numerical and backward, with their tables in the code, and those with tests.

    Examples: `samebits check contract`, `samebits check contract --write`
    """
    from samebits.judge import contract
    from samebits.judge.backward_contract import BACKWARD

    for catalogue in (contract.NUMERICAL, BACKWARD):
        document = ROOT / "docs" / catalogue.file
        if write:
            contract.write(document, catalogue)
        contract.check(document, ROOT, catalogue)
        rows = list(catalogue.tests())
        tests = {test for _, named in rows for test in named}
        out.print(f"{document.relative_to(ROOT)}: {len(rows)} rows, {len(tests)} tests, as in the code")


@bench.command("cpu")
def bench_cpu(
    record: Annotated[Path | None, typer.Option("--out", help="write the measurement to this JSON file")] = None,
    layers: Annotated[int, typer.Option(min=1, help="of the random Qwen3")] = 6,
    hidden: Annotated[int, typer.Option(help="its hidden size, a multiple of 128")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each arm at each workload; 5 or more count")] = 7,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="vLLM compiles its graph; the recipe's engine does not")
    ] = False,
) -> None:
    """Time both arms in one run, taking turns: vLLM's decode and prefill, a forward and backward of Megatron Core.

    Exit code 0 if every workload's median ratio is what it must be, over 5 rounds or more; 1 otherwise.

    Example: `samebits bench cpu --out manifests/evidence/cpu/bench.json`
    """
    from samebits.bench import pairs
    from samebits.evidence.measurement import BENCH
    from samebits.judge import missed_speed

    with _phases() as say:
        document = pairs.measure(layers, hidden, rounds, compiled, say, ROOT / "build" / "bench")
    out.print(pairs.table(document))
    if record is not None:
        BENCH.write(record, document)
        out.print(f"{record}", markup=False)
    if slow := missed_speed(document):
        err.print(f"error: not what it must be: {'; '.join(slow)}", style="red", markup=False)
        raise typer.Exit(1)


@bench.command("engine")
def bench_engine(
    arm: Annotated[list[str], typer.Option(help="NAME=BI, or NAME=BI@FOLDER of another vllm; repeat")],
    case: Annotated[list[str], typer.Option(help="PROMPT,ANSWER,REQUESTS; repeat")],
    model: Annotated[str, typer.Option(help="the Qwen3 whose sizes it has")] = "8B",
    rounds: Annotated[int, typer.Option(min=1, help="turns of each arm at each case")] = 3,
    eager: Annotated[bool, typer.Option("--eager", help="neither compiled nor captured")] = False,
    apart: Annotated[
        bool,
        typer.Option(
            "--apart", help="engines that do not fit beside each other: one sleeps while another has its turn"
        ),
    ] = False,
    record: Annotated[Path | None, typer.Option("--out", help="write the measurement to this JSON file")] = None,
) -> None:
    """Time vLLM's engines on one GPU, alive together, taking turns, and compare the bits of what they say.

    Weights are drawn on the card from their names: the same in every arm, real in size and in bits.

    Example: `samebits bench engine --arm bi0=0 --arm bi1=1 --case 1024,128,1 --case 1024,128,16`
    """
    from samebits.bench import card
    from samebits.evidence.measurement import ENGINES

    with _phases() as say:
        document = card.measure(
            model,
            [card.Arm.parse(text) for text in arm],
            [card.Case.parse(text) for text in case],
            rounds,
            eager,
            apart,
            say,
            ROOT / "build" / "bench",
        )
    for table in card.tables(document):
        out.print(table)
    if record is not None:
        ENGINES.write(record, document)
        out.print(f"{record}", markup=False)


@bench.command("rl")
def bench_rl(
    folder: Annotated[Path, typer.Option("--out", help="for the runs' folders, steps.json and steps.html")],
    which: Annotated[list[str] | None, typer.Option("--run", help="bi0, bi1, bi0-tis; default: bi0 and bi1")] = None,
    steps: Annotated[int, typer.Option(min=1, help="of each run; the first is not timed")] = 6,
    chunk: Annotated[int | None, typer.Option(min=1, help="steps that this call takes; the next call goes on")] = None,
    settings: Settings = None,
    warm_start: Warm = None,
    device: RecipeDevice = Device.cpu,
    geometry: Geometry = None,
) -> None:
    """Train both arms on the recipe and put their steps side by side: phases, memory, logprobs that differ, reward.

    A call goes on from the checkpoints of the one before it, also after one that was killed. bi0-tis is BI=0 with
    verl's truncated importance sampling.

    Examples: `samebits bench rl --device cuda --model qwen3-1.7b --out build/steps`,
    `samebits bench rl --run bi0 --run bi1 --run bi0-tis --steps 40 --chunk 10 --out build/curves`
    """
    from samebits.bench import steps as runs
    from samebits.evidence.measurement import STEPS
    from samebits.judge import steps as judged
    from samebits.report.steps import figures

    if unknown := [name for name in which or () if name not in runs.COLUMNS]:
        raise typer.BadParameter(f"{unknown[0]}: give some of {', '.join(runs.COLUMNS)}", param_hint="--run")
    columns = [runs.COLUMNS[name] for name in dict.fromkeys(which or ("bi0", "bi1"))]
    overrides, model = _pairs(settings, "--set"), _described(device, geometry, warm_start)
    with _saying() as say:
        document = runs.run(columns, steps, chunk, folder, overrides, model, str(device), say)
    if document is None:
        return
    STEPS.write(folder / "steps.json", document)
    notes = judged.missed_quality(document) if steps >= judged.LEAST_STEPS else judged.missed_speed(document)
    notes = [f"missed: {text}" for text in notes]
    _page(folder / "steps.html", "Training steps side by side", runs.tables(document), notes, figures(document))


@bench.command("gemm")
def bench_gemm(
    record: Annotated[Path | None, typer.Option("--out", help="write the measurement to this JSON file")] = None,
) -> None:
    """Time products of few rows on one GPU, ours beside the libraries', and compare their bits with the reference.

    Exit code 1 if an element differs, or a figure is not what it must be.

    Example: `samebits bench gemm --out build/gemm.json`
    """
    from samebits.bench import gemm
    from samebits.evidence.measurement import GEMM
    from samebits.judge import missed_products, products

    with _phases() as say:
        document = gemm.document(say)
    out.print(gemm.table(document))
    for name, value in products.summary(document).items():
        out.print(f"{name}: {value:.3g}", markup=False)
    _recorded(GEMM, record, document, missed_products(document))


@bench.command("operators")
def bench_operators(
    record: Annotated[Path | None, typer.Option("--out", help="write the measurement to this JSON file")] = None,
) -> None:
    """Compare and time the operators of BI=1 other than products on one GPU, and FlashAttention 3 beside neighbours.

    Exit code 1 if an element differs that must not, or an error is too large.

    Example: `samebits bench operators --out build/operators.json`
    """
    from samebits.bench import operators
    from samebits.evidence.measurement import OPERATORS
    from samebits.judge import missed_operators

    with _phases() as say:
        document = operators.document(say)
    for table in operators.tables(document):
        out.print(table)
    for name, value in operators.summary(document).items():
        out.print(f"{name}: {value:.3g}", markup=False)
    _recorded(OPERATORS, record, document, missed_operators(document))


@bench.command("backward")
def bench_backward(
    tests: Annotated[Path | None, typer.Option(help="Transformer Engine's tests/pytorch of its release")] = None,
    record: Annotated[Path | None, typer.Option("--out", help="write the measurement to this JSON file")] = None,
) -> None:
    """Measure the backward modes of Transformer Engine on one GPU, as released and patched.

    Exit code 1 if the patched package does not do what a mode says, or something is not measured.

    Example: `samebits bench backward --tests TransformerEngine/tests/pytorch --out build/backward.json`
    """
    from samebits.bench import backward
    from samebits.evidence.measurement import BACKWARD
    from samebits.judge import missed_backward_modes

    with _phases() as say:
        document = backward.document(tests, say)
    out.print(backward.table(document))
    _recorded(BACKWARD, record, document, missed_backward_modes(document))


def _recorded(kind: "Kind", record: Path | None, document: dict[str, Any], wrong: list[str]) -> None:
    """Write a measurement where a file was named, then say what it lacks: exit code 1 if anything."""
    if record is not None:
        kind.write(record, document)
        out.print(f"{record}", markup=False)
    if wrong:
        err.print(f"error: not what it must be: {'; '.join(wrong)}", style="red", markup=False)
        raise typer.Exit(1)


@contextmanager
def _phases() -> Iterator[Callable[[str], None]]:
    """What says which phase is running: on one line that changes, or a line each where nobody looks."""
    with err.status("starting") as status:

        def say(phase: str) -> None:
            status.update(phase)
            if not err.is_terminal:
                err.print(phase, markup=False)

        yield say


def _verdict(receipt: dict[str, Any], text: str) -> None:
    """Print a receipt's summary; anything but a pass is exit code 1."""
    out.print(text, markup=False)
    if receipt["verdict"] != "pass":
        raise typer.Exit(1)


def _match(pins: "Pins", checkouts: list[Path]) -> dict[str, Path]:
    """The checkout of each pinned commit."""
    from samebits.sources.records import match_checkout

    return {base.commit: checkout for checkout in checkouts for _, base in match_checkout(pins, checkout)}


def _reads(upstream: "Upstream", base: "Base", checkouts: dict[str, Path]) -> Iterator[tuple[str, "Read"]]:
    """The sources of a base that are at hand, each with its name: its release wheels, or its commit in a checkout."""
    import zipfile

    from samebits.sources.fetch import fetch
    from samebits.sources.records import read_commit
    from samebits.sources.wheels import read_wheel

    if base.commit in checkouts:
        yield f"commit {base.commit[:12]}", read_commit(checkouts[base.commit], base.commit)
    for artefact in _progress(upstream.artefacts_of(base.name), "checking"):
        with zipfile.ZipFile(fetch(artefact)) as wheel:
            yield artefact.file, read_wheel(wheel)


def _export(pins: "Pins", upstream: "Upstream", base: "Base", checkouts: dict[str, Path]) -> list[Path] | None:
    """The exported series of a base, or None if its sources are not at hand."""
    from samebits.sources.series import export

    for _, read in _reads(upstream, base, checkouts):
        return export(read, _plan(read, upstream, base), pins.commit, SERIES / upstream.key / base.name)
    return None


def _plan(read: "Read", upstream: "Upstream", base: "Base") -> "list[tuple[Patch, dict[str, bytes]]]":
    from samebits.sources.patching import plan_series

    return plan_series(read, upstream.key, base.name, PATCHES, () if base.commit else upstream.packages)


if __name__ == "__main__":
    app()
