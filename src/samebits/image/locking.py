"""Makes the locks of the image: which .debs (apt decides, at this machine's mirror) and which wheels (pip decides).

Nothing is downloaded but lists and metadata. apt verifies the lists by Debian's own keys.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from samebits.image.plan import Image, ImageError, load_image, locked_packages, write_lock
from samebits.sources.pins import PROFILES

SOURCES = Path("/etc/apt")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Packages of the lock that were released as a source archive alone; each holds Python and nothing else.
SOURCE_ONLY = ("antlr4-python3-runtime",)


def lock(root: Path) -> None:
    """Write image/debian.lock and image/PROFILE.lock below `root`. Raises ImageError."""
    image = load_image(root)
    with apt(image) as run:
        essential = "?narrow(?archive(^stable$),?architecture(amd64),?essential)"
        printed = run("install", "--print-uris", "-qq", "-y", essential, *image.packages)
        names = re.findall(r"/([^/'_]+)_[^/']+\.deb'", printed)
        shown = run.show(*map(unquote, names))
        debs: list[tuple[str, ...]] = [shown[unquote(name)] for name in names]
    write_lock(root / "image" / "debian.lock", debs, f"Debian {image.suite}: name, version, architecture, sha256.")
    for profile in PROFILES:
        found = _wheels(image, root, profile)
        what = f"The {profile} profile's release files for Python {image.python}: name, version, sha256, file."
        write_lock(root / "image" / f"{profile}.lock", found, what)


class Apt:
    """apt with a state of its own and one suite, whatever this machine's own Debian is."""

    def __init__(self, config: Path) -> None:
        self._environment = {
            **os.environ,
            "APT_CONFIG": str(config),
            "LC_ALL": "C",
            "DEBIAN_FRONTEND": "noninteractive",
        }

    def __call__(self, *arguments: str, folder: Path | None = None, program: str = "apt-get") -> str:
        """Standard output of an apt command. Raises ImageError with what apt said."""
        done = subprocess.run([program, *arguments], cwd=folder, env=self._environment, capture_output=True, text=True)
        if done.returncode:
            said = "\n".join(line for line in done.stderr.splitlines() if line.startswith("E:"))[-1500:]
            raise ImageError(f"{program} {arguments[0]}: {said or done.stderr[-500:]}")
        return done.stdout

    def show(self, *names: str) -> dict[str, tuple[str, str, str, str]]:
        """name -> (name, version, architecture, sha256) of the newest version of each package that is served."""
        found = {}
        for stanza in self("show", "--no-all-versions", *names, program="apt-cache").split("\n\n"):
            said = dict(line.split(": ", 1) for line in stanza.splitlines() if re.match(r"[A-Z][\w-]+: ", line))
            if said:
                found[said["Package"]] = (said["Package"], said["Version"], said["Architecture"], said["SHA256"])
        return found


@contextmanager
def apt(image: Image) -> Iterator[Apt]:
    """An apt that knows the image's suite at this machine's mirror. Raises ImageError."""
    with tempfile.TemporaryDirectory(prefix="samebits-apt-") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        for name in ("state/lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "sources.list").write_text(f"deb [arch=amd64 signed-by={KEYRING}] {mirror()} {image.suite} main\n")
        settings = {
            "Dir::Etc::SourceList": folder / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "APT::Architecture": "amd64",
            "APT::Sandbox::User": "root",
            "APT::Install-Recommends": "false",
            "Acquire::Languages": "none",
        }
        config = folder / "apt.conf"
        config.write_text("".join(f'{key} "{value}";\n' for key, value in settings.items()))
        run = Apt(config)
        run("update", "-qq")
        yield run


def mirror() -> str:
    """The address of Debian's archive: DEBIAN_MIRROR, else the first that apt knows here. Raises ImageError."""
    said = os.environ.get("DEBIAN_MIRROR", "")
    if not said:
        files = [SOURCES / "sources.list", *sorted((SOURCES / "sources.list.d").glob("*"))]
        text = "\n".join(path.read_text(errors="replace") for path in files if path.is_file())
        found = re.findall(r"^(?:URIs: *|deb (?:\[[^\]]*\] )?)(\S+/debian)/?(?:\s|$)", text, re.M)
        said = found[0] if found else ""
    if not said:
        raise ImageError("no Debian mirror is known here. Remedy: set DEBIAN_MIRROR to the address of one.")
    return said


def pip_tags(image: Image) -> list[str]:
    """Options by which pip chooses for the image's Python, whatever runs here."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(image.glibc, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", image.python]
    for abi in (f"cp{image.python.replace('.', '')}", "abi3", "none"):
        options += ["--abi", abi]
    for platform in platforms:
        options += ["--platform", platform]
    return options


def requirement(name: str, version: str, hashes: Sequence[str]) -> str:
    """A line of a requirements file that only these files satisfy."""
    return f"{name}=={version} " + " ".join(f"--hash=sha256:{digest}" for digest in hashes) + "\n"


def _wheels(image: Image, root: Path, profile: str) -> list[tuple[str, ...]]:
    """name, version, sha256 and file of what pip would install; a package that has one release file is that file."""
    wanted = {n: said for n, said in locked_packages(root, profile).items() if n not in image.leave_out}
    archives = [name for name in SOURCE_ONLY if name in wanted]
    with tempfile.TemporaryDirectory(prefix="samebits-lock-") as scratch:
        asked, report = Path(scratch) / "asked.txt", Path(scratch) / "report.json"
        asked.write_text("".join(requirement(n, v, sorted(h)) for n, (v, h) in wanted.items() if n not in archives))
        command = [sys.executable, "-m", "pip", "--no-input", "install", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--require-hashes", "--quiet", "--disable-pip-version-check", "--report", str(report)]
        command += ["--target", scratch, "--requirement", str(asked), *pip_tags(image)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))[-1500:]
            raise ImageError(f"{profile}: pip finds no wheel: {said}\nRemedy: lock another version (`make lock`).")
        items = json.loads(report.read_text())["install"]
    rows: list[tuple[str, ...]] = []
    for item in items:
        file = unquote(item["download_info"]["url"].rpartition("/")[2])
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        rows.append(
            (name, item["metadata"]["version"], item["download_info"]["archive_info"]["hashes"]["sha256"], file)
        )
    for name in archives:
        version, hashes = wanted[name]
        (digest,) = hashes
        rows.append((name, version, digest, f"{name}-{version}.tar.gz"))
    return rows
