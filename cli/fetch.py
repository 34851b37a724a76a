"""What brings models in and out: `pull`, `push`, `create`, `import`.

Paths are the user's: they are made absolute here, since the daemon has a folder of its own. A
daemon on this machine is told the path and links the files; to one elsewhere they are uploaded.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from .client import ApiError, Client
from .errors import CommandFailed
from .render import Spinner, pull_display
from .tables import import_row, table
from .units import size_text

Json = dict[str, Any]
CHUNK_BYTES = 1 << 20
MODEL_FILES = ("*.safetensors", "*.gguf", "*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt")


# ----------------------------------------------------------------------------- pull


def pull(
    client: Client,
    model: str,
    insecure: bool = False,
    as_name: str = "",
    accept_terms: bool = False,
) -> str:
    """Fetch it; returns the name it has here. Raises ApiError, Unreachable, CommandFailed."""
    body: Json = {"model": place_text(client, model), "accept_terms": accept_terms}
    body |= {"insecure": True} if insecure else {}
    body |= {"as": as_name} if as_name else {}
    try:
        return _pull_once(client, model, body)
    except ApiError as error:
        if "--accept-terms" not in str(error) or not sys.stdin.isatty():
            raise
        print(str(error).partition("\n\n")[0], file=sys.stderr)
    if input("Accept these terms? [y/N] ").strip().lower() not in ("y", "yes"):
        raise CommandFailed("the terms were not accepted; nothing was fetched")
    return _pull_once(client, model, {**body, "accept_terms": True})


def _pull_once(client: Client, model: str, body: Json) -> str:
    name, shown = model, model.partition("#")[0]
    with closing(client.stream("/api/pull", body)) as lines, pull_display(shown) as display:
        for line in lines:
            display.update(line)
            name = line.get("model") or name
    return name


def place_text(client: Client, text: str) -> str:
    """What to pull as the daemon understands it: paths absolute. Raises CommandFailed."""
    if not looks_like_path(text):
        return text
    path = Path(text).expanduser()
    path = path if path.is_absolute() else Path.cwd() / path
    if client.address.is_local and not path.exists():
        raise CommandFailed(f"there is no file or folder {path}")
    return str(path)


def looks_like_path(text: str) -> bool:
    """A path, or a file beside us. Names of models and addresses are none."""
    if "://" in text:
        return False
    is_marked = text.startswith(("/", "~", "./", "../", ".\\", "..\\")) or text in (".", "..")
    is_drive = text[1:3] in (":\\", ":/")
    return is_marked or is_drive or (text.lower().endswith(".gguf") and Path(text).is_file())


# ----------------------------------------------------------------------------- push


def push(client: Client, model: str, insecure: bool) -> None:
    body = {"model": model, "insecure": insecure}
    with (
        closing(client.stream("/api/push", body)) as lines,
        pull_display(model, "pushing") as shown,
    ):
        for line in lines:
            shown.update(line)


# --------------------------------------------------------------------------- create


def create(client: Client, model: str, modelfile: str, quantize: str) -> None:
    """Make a model of a Modelfile; `-` is standard input."""
    text, folder = _read_modelfile(modelfile)
    parsed = client.post("/api/modelfile", {"modelfile": text})
    for warning in parsed.get("warnings", ()):
        print(warning, file=sys.stderr)
    body: Json = {"model": model}
    if quantize:
        body["quantize"] = quantize
    bases = [_existing(folder, base) for base in parsed["from"]]
    paths = [base for base in bases if isinstance(base, Path)]
    if len(bases) == 1 and (not paths or client.address.is_local):
        body["from"] = str(bases[0])
    elif len(paths) == len(bases):
        body["files"] = _upload(client, paths)
    else:
        raise CommandFailed("several FROM lines must all be files: a model and its projector")
    adapters = [_existing(folder, adapter) for adapter in parsed.get("adapters", ())]
    missing = [str(adapter) for adapter in adapters if not isinstance(adapter, Path)]
    if missing:
        raise CommandFailed(f"there is no adapter {missing[0]}")
    if adapters:
        body["adapters"] = _upload(client, [path for path in adapters if isinstance(path, Path)])
    for key in ("template", "system", "license", "parameters", "messages"):
        if parsed.get(key):
            body[key] = parsed[key]
    with (
        closing(client.stream("/api/create", body)) as lines,
        pull_display(model, "making") as display,
    ):
        for line in lines:
            display.update(line)


def _read_modelfile(path: str) -> tuple[str, Path]:
    if path == "-":
        return sys.stdin.read(), Path.cwd()
    place = Path(path).expanduser()
    if not place.is_file():
        raise CommandFailed(f"there is no {path}; name the Modelfile with -f")
    content = place.read_bytes()
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return content.decode(encoding), place.resolve().parent
    except UnicodeDecodeError:
        raise CommandFailed(f"{path} is neither UTF-8 nor UTF-16") from None


def _existing(folder: Path, text: str) -> Path | str:
    """The path, if the text is one; else the text, which is then a model's name."""
    path = folder / Path(text).expanduser()
    if path.exists():
        return path.resolve()
    if looks_like_path(text):
        raise CommandFailed(f"there is no file or folder {path}")
    return text


def _upload(client: Client, paths: Sequence[Path]) -> dict[str, str]:
    """Bring files to the daemon; returns digest by name. Files that it has are not sent again."""
    found: dict[str, str] = {}
    for name, path in _files_of(paths):
        with Spinner(f"hashing {name}"):
            digest = f"sha256:{_sha256(path)}"
        if not client.has(f"/api/blobs/{digest}"):
            with Spinner(f"uploading {name}, {size_text(path.stat().st_size)}"):
                client.upload(f"/api/blobs/{digest}", path)
        found[name] = digest
    return found


def _files_of(paths: Iterable[Path]) -> list[tuple[str, Path]]:
    files: list[tuple[str, Path]] = []
    for path in paths:
        if path.is_file():
            files.append((path.name, path))
            continue
        inside = {file for pattern in MODEL_FILES for file in path.glob(pattern)}
        inside |= {file for pattern in MODEL_FILES for file in path.glob(f"*/{pattern}")}
        files += [(file.relative_to(path).as_posix(), file) for file in sorted(inside)]
    if not files:
        raise CommandFailed(f"{paths} holds no model")
    return files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------- import


def import_models(
    client: Client, path: str, names: Sequence[str], as_name: str, take_all: bool, dry_run: bool
) -> None:
    """Take over models of other tools; without a path or --all only show what is there."""
    body: Json = {"dry_run": dry_run or not (path or take_all or names)}
    if path:
        place = Path(path).expanduser()
        body["path"] = str(place if place.is_absolute() else Path.cwd() / place)
    body |= {"names": list(names)} if names else {}
    body |= {"as_name": as_name} if as_name else {}
    rows = []
    with (
        closing(client.stream("/api/import", body)) as lines,
        Spinner("looking for models") as spinner,
    ):
        for line in lines:
            if line.get("status") == "hashing":
                spinner.say(f"hashing {line['model']}: {100 * line['completed'] // line['total']}%")
            elif line.get("status") != "success":
                rows.append(import_row(line))
    if not rows:
        print("no models of other tools were found on this machine", file=sys.stderr)
        return
    print(table(("NAME", "SIZE", "FROM", "STATUS"), rows))
    if body["dry_run"] and not dry_run:
        print("Take them over with: llmd import --all, or --only NAME", file=sys.stderr)
