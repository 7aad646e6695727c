"""Fetch what a lab boots: a kernel of the distribution, unpacked and never installed, busybox, QEMU, makers of disks.

In: the machine's own package sources. Out: a folder with `vmlinuz`, the few modules a guest loads, `busybox` and
`kernel.json`, which says where they come from. The machine's apt configuration is read and left as it is: lists and
packages go to a private state that is removed again. Only QEMU and what makes file systems are installed, by root,
where they are missing.
"""

import gzip
import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

OLDEST_KERNEL = (6, 5)
"""The first with cachestat(2), by which every access asks what is resident."""

QEMU = "qemu-system-x86_64"

WANTED_MODULES = ("virtio_pci", "virtio_blk", "ext4", "9p", "9pnet_virtio", "virtio_console", "xfs")
"""What a guest needs, each built in or a module; what they depend on comes with them."""

MODULES_IF_THERE = ("crc32c_generic", "crc32c_cryptoapi")
"""What ext4 asks for by another name than a dependency's; newer kernels have it built in under no name at all."""

_PATIENCE_S = 900
_PROGRAMS = {QEMU: "qemu-system-x86", "mke2fs": "e2fsprogs", "mkfs.xfs": "xfsprogs"}
_BUSYBOX_PACKAGE = "busybox-static"
_KERNEL_PACKAGE = "linux-image-amd64"


class SetupRefused(RuntimeError):
    """The lab cannot be set up here; the message says what is missing and what to do."""


def check_architecture() -> None:
    """Refuses machines whose guests nobody has tried.

    Raises:
        SetupRefused: this is not x86-64.
    """
    if platform.machine() != "x86_64":
        raise SetupRefused(
            f"the lab runs on x86-64 only so far, this machine is {platform.machine()}; run it on another machine, or "
            "replay here without a guest: replayer replay"
        )


def set_up(folder: Path, say: Callable[[str], None]) -> None:
    """Fetches kernel and busybox into `folder`, installs the programs that are missing; nothing where all is there.

    Raises:
        SetupRefused: there is no such package, no right to install it, or another distribution.
    """
    check_architecture()
    missing = [package for program, package in _PROGRAMS.items() if find_program(program) is None]
    if missing:
        _install(missing, say)
    if (folder / "kernel.json").is_file():
        say(f"{folder}: kernel {json.loads((folder / 'kernel.json').read_text())['release']} is there")
        return
    for program in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(program) is None:
            raise SetupRefused(
                f"no {program} here: kernels are fetched from Debian's and Ubuntu's packages so far; unpack a kernel "
                f"of 6.5 or newer on such a machine and copy its folder to {folder}"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".lab-setup-", dir=folder.parent) as name:
        # Not as it was said: apt is told of folders, and runs in one of them.
        work = Path(name).resolve()
        apt = _private_apt(work)
        say("reading the package lists of this machine's own mirror")
        _run([*apt("apt-get"), "update", "-qq"], work)
        package, version = _newest_kernel(apt, work)
        say(f"fetching {package} {version} and {_BUSYBOX_PACKAGE}")
        _run([*apt("apt-get"), "download", "-qq", f"{package}={version}", _BUSYBOX_PACKAGE], work)
        kernel_deb, busybox_deb = _one(work, "linux-image-*.deb"), _one(work, "busybox-static*.deb")
        _run(["dpkg-deb", "-x", str(kernel_deb), str(work / "kernel")], work)
        _run(["dpkg-deb", "-x", str(busybox_deb), str(work / "busybox")], work)
        ready = work / "ready"
        ready.mkdir()
        said = {"package": package, "version": version, "sha256": _sha256(kernel_deb)}
        gather(work / "kernel", ready, said)
        shutil.copy2(_one(work / "busybox", "bin/busybox", "usr/bin/busybox"), ready / "busybox")
        shutil.rmtree(folder, ignore_errors=True)
        ready.rename(folder)
    say(f"{folder}: kernel {json.loads((folder / 'kernel.json').read_text())['release']} of {package}")


def gather(unpacked: Path, ready: Path, said: dict[str, str]) -> None:
    """Takes what a guest needs out of an unpacked kernel package; `said` is kept in kernel.json.

    Raises:
        SetupRefused: the kernel is not there, too old, or lacks a module.
    """
    image = _one(unpacked, "boot/vmlinuz-*")
    release = image.name.removeprefix("vmlinuz-")
    number = re.match(r"([0-9]+)\.([0-9]+)", release)
    if number is None or (int(number[1]), int(number[2])) < OLDEST_KERNEL:
        raise SetupRefused(f"kernel {release}, wanted 6.5 or newer: it lacks cachestat(2); enable the backports")
    tree = _one(unpacked, f"lib/modules/{release}", f"usr/lib/modules/{release}")
    shutil.copy2(image, ready / "vmlinuz")
    names = []
    for name, content in modules_in_order(tree, WANTED_MODULES):
        names.append(name)
        (ready / f"{name}.ko").write_bytes(content)
    (ready / "kernel.json").write_text(json.dumps({"release": release, **said, "modules": names}, indent=1) + "\n")


def modules_in_order(tree: Path, wanted: Iterable[str]) -> list[tuple[str, bytes]]:
    """(name, content) of the modules below `tree`, each after those it depends on; without those built in.

    Raises:
        SetupRefused: a module is neither there nor built in.
    """
    built_in = {_module_name(line) for line in (tree / "modules.builtin").read_text().split()}
    files = {_module_name(path.name): path for path in tree.rglob("*.ko*")}
    done: dict[str, bytes] = {}

    def add(name: str, depth: int = 0) -> None:
        if name in done or name in built_in:
            return
        if name not in files or depth > 20:
            raise SetupRefused(f"{tree}: no module {name}, which a guest needs; use the distribution's generic kernel")
        content = _decompressed(files[name])
        for needed in dependencies(content):
            add(needed, depth + 1)
        done[name] = content

    for name in MODULES_IF_THERE:
        if name in files:
            add(name)
    for name in wanted:
        add(_module_name(name))
    return list(done.items())


def dependencies(module: bytes) -> list[str]:
    """Names in `depends=` of a module's .modinfo section."""
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    return [] if found is None or not found[1] else [_module_name(one) for one in found[1].decode().split(",")]


def _module_name(file: str) -> str:
    return file.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def _decompressed(path: Path) -> bytes:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix == ".zst":
        zstd = shutil.which("zstd")
        if zstd is None:
            raise SetupRefused(f"{path.name} is compressed by zstd, which is missing; install it: apt-get install zstd")
        return subprocess.run([zstd, "-dcq", str(path)], capture_output=True, check=True, timeout=60).stdout  # noqa: S603
    return path.read_bytes()


def find_program(name: str) -> str | None:
    """Where a program lies, also those of administrators, which not every user's path has; null if nowhere."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _install(packages: Sequence[str], say: Callable[[str], None]) -> None:
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupRefused(f"not installed here: {', '.join(packages)}; install it as root: {' '.join(command)}")
    say(f"installing {', '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(command, capture_output=True, env=environment, timeout=_PATIENCE_S, check=False).returncode:  # noqa: S603
        _run(["apt-get", "update", "-qq"], Path())
        _run(command, Path(), environment)


def _private_apt(work: Path) -> Callable[[str], list[str]]:
    """The words that make apt use this machine's mirror with the backports, and nothing of its state."""
    release = _os_release()
    codename, distribution = release.get("VERSION_CODENAME"), release.get("ID")
    if codename is None or distribution not in ("debian", "ubuntu"):
        raise SetupRefused(
            f"this is {distribution or 'no distribution that is known'}, wanted Debian or Ubuntu packages"
        )
    lines = source_lines(_source_texts(), codename, distribution)
    if not lines:
        raise SetupRefused(
            f"/etc/apt: no source of {codename} with main packages; add one, or copy a kernel folder here"
        )
    (work / "sources.list").write_text("".join(f"{line}\n" for line in lines))
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        (work / name).mkdir(parents=True)
    options = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": work / "parts",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        # As root apt would download as a user of its own, who may not write here.
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        # Else `apt-get update` ends well although no list could be fetched.
        "APT::Update::Error-Mode": "any",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return lambda program: [program, *words]


def source_lines(texts: Sequence[str], codename: str, distribution: str) -> list[str]:
    """Lines of a sources.list for the release and its newer kernels, at the mirrors that `texts` name.

    texts: files of apt, of one line per source or of paragraphs (sources.list(5)).
    """
    found: dict[tuple[str, str], None] = {}
    for text in texts:
        for uri, suites, components, signed_by in _sources(text):
            if codename in suites and "main" in components:
                found[uri, f"[signed-by={signed_by}] " if signed_by else ""] = None
    newer = f"{codename}-backports" if distribution == "debian" else f"{codename}-updates"
    return [f"deb {option}{uri} {suite} main" for uri, option in found for suite in (codename, newer)]


def _sources(text: str) -> list[tuple[str, list[str], list[str], str | None]]:
    """(uri, suites, components, key file) of every source of packages."""
    found = []
    for line in text.splitlines():
        one = re.match(r"deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+(.+)", line.strip())
        if one is not None:
            key = re.search(r"signed-by=(\S+)", one[1] or "")
            found.append((one[2], [one[3]], one[4].split(), None if key is None else key[1]))
    for paragraph in re.split(r"\n\s*\n", text):
        kept = "\n".join(line for line in paragraph.splitlines() if not line.startswith("#"))
        fields = {key.lower(): value.split() for key, value in re.findall(r"(?m)^([A-Za-z-]+):[ \t]*(.*)$", kept)}
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            key_file = fields.get("signed-by", [])
            signed_by = key_file[0] if len(key_file) == 1 and key_file[0].startswith("/") else None
            found += [
                (uri, fields.get("suites", []), fields.get("components", []), signed_by) for uri in fields["uris"]
            ]
    return found


def _source_texts() -> list[str]:
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted(folder.glob("sources.list.d/*.list")),
             *sorted(folder.glob("sources.list.d/*.sources"))]  # fmt: skip
    return [file.read_text(errors="replace") for file in files if file.is_file()]


def _os_release() -> dict[str, str]:
    file = Path("/etc/os-release")
    lines = file.read_text().splitlines() if file.is_file() else []
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}


def _newest_kernel(apt: Callable[[str], list[str]], work: Path) -> tuple[str, str]:
    """(package, version) of the generic kernel with the highest version."""
    name = _KERNEL_PACKAGE if _os_release().get("ID") == "debian" else "linux-image-generic"
    shown = _run([*apt("apt-cache"), "show", name], work)
    depends = re.findall(r"(?m)^Depends:.*?(linux-image-[0-9][^\s,(|]*)", shown)
    found: list[tuple[str, str]] = []
    for package in dict.fromkeys(depends):
        version = re.search(r"(?m)^Version: (\S+)$", _run([*apt("apt-cache"), "show", package], work))
        if version is not None:
            found.append((package, version[1]))
    if not found:
        raise SetupRefused(f"the package lists have no {name}; see apt-cache policy {name}")
    return max(found, key=lambda one: [int(part) for part in re.findall(r"[0-9]+", one[1])[:4]])


def _one(folder: Path, *patterns: str) -> Path:
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if found:
            return found[-1]
    raise SetupRefused(f"{folder}: no {' or '.join(patterns)} in the package; use another kernel package")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _run(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    done: subprocess.CompletedProcess[Any] = subprocess.run(  # noqa: S603 - our own words
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise SetupRefused(f"{command[0]} ended with code {done.returncode}: {' '.join(last)}; look at the network")
    return str(done.stdout)
