"""Where a model's files are, and whether they are whole, before any of them is loaded."""

import json
import re
import ssl
from dataclasses import dataclass
from difflib import get_close_matches
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener, getproxies, proxy_bypass

from huggingface_hub import constants
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

from worker.model.errors import ModelError

HUB_S = 5.0  # for a connection to it, and again for its first answer
FIRST_SERVER_ERROR = 500  # of the hub, or of a proxy that does not reach it
BUILT_IN = ("tiny", "smollm2")  # names that are neither files nor on the hub
_ALIKE = 0.7  # of difflib: smolm2, SmolLM2 and tinny are mistyped, gpt2 is a name on the hub

_NAME_SHOWN = 100  # characters

_AGAIN = "Copy or download it again"
_GGUF_HEADER = 24  # bytes that every GGUF file begins with

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What transformers is asked to load."""

    source: str  # a folder, or a name on the hub
    gguf_file: str | None = None  # in that folder

    @property
    def is_folder(self) -> bool:
        return Path(self.source).is_dir()


def find_checkpoint(name: str) -> Checkpoint:
    """The checkpoint that `name` means: a GGUF file, a folder with one, a folder with safetensors, or a hub name.

    Raises ModelError for a file that does not exist, a folder that holds no model, or several, and a built-in name that
    is mistyped.
    """
    try:
        return _find_checkpoint(name, Path(name))
    except OSError as error:  # longer than a name can be, or where we may not look
        raise ModelError(
            f"there is no model {_short(name)}: it cannot be found ({error.strerror}). Name a folder, a GGUF file, "
            f"{', '.join(f'`{built_in}`' for built_in in BUILT_IN)}, or a model on the Hugging Face hub (OWNER/NAME)"
        ) from error


def _short(name: str) -> str:
    return repr(name) if len(name) <= _NAME_SHOWN else f"{name[:_NAME_SHOWN]!r}... ({len(name)} characters)"


def _find_checkpoint(name: str, path: Path) -> Checkpoint:
    if not path.exists() and "/" not in name and (meant := get_close_matches(name.lower(), BUILT_IN, cutoff=_ALIKE)):
        raise ModelError(
            f"there is no model {name!r}: did you mean `{meant[0]}`? (Or a folder, a GGUF file, or a name on the "
            "Hugging Face hub, which is OWNER/NAME)"
        )
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"the GGUF file {name} does not exist")
        return Checkpoint(str(path.parent), path.name)
    if path.is_file():
        raise ModelError(f"{name} is a file, and no GGUF file: name its folder, {path.absolute().parent}")
    if not path.is_dir():
        return Checkpoint(name)
    if (path / "config.json").exists():
        return Checkpoint(name)
    gguf_files = sorted(file.name for file in path.glob("*.gguf"))
    if len(gguf_files) > 1:
        raise ModelError(f"the folder {name} holds several GGUF files: name one of {', '.join(gguf_files)}")
    if not gguf_files:
        raise ModelError(f"the folder {name} holds no model: config.json is missing")
    return Checkpoint(name, gguf_files[0])


def check_first(checkpoint: Checkpoint) -> None:
    """Raises ModelError for a damaged GGUF file, or a config.json that holds no settings: before anything is read."""
    folder = Path(checkpoint.source)
    if checkpoint.gguf_file:
        _check_gguf(folder / checkpoint.gguf_file)
    elif checkpoint.is_folder and not isinstance(_read_json(folder / "config.json"), dict):
        raise ModelError(f"{folder / 'config.json'} is damaged: it holds no table of settings. {_AGAIN}")


def check_files(checkpoint: Checkpoint) -> None:
    """Raises ModelError when a folder's safetensors are missing, cut off, or hold what we do not load.

    On the hub they are what was published.
    """
    if checkpoint.gguf_file or not checkpoint.is_folder:
        return
    folder = Path(checkpoint.source)
    incomplete = f"the folder {folder} holds no complete model:"
    if (folder / _INDEX).exists():
        names = _shards(folder / _INDEX)
    elif (folder / _SINGLE).exists():
        names = [_SINGLE]
    elif any(folder.glob("*.bin")):
        raise ModelError(
            f"{incomplete} its weights are pickles (*.bin), which can run code when they are read. Save it as "
            "safetensors"
        )
    else:
        raise ModelError(f"{incomplete} {_SINGLE} is missing")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{incomplete} {len(missing)} of {len(names)} files are missing, the first is {missing[0]}")
    for name in names:
        _check_safetensors(folder / name)


def hub_answers() -> bool:
    """Whether the Hugging Face hub can be asked. Its library would try for half a minute, for a cached model, too.

    An address that takes connections is not enough: a proxy, or a network that has no way out, takes them all.
    """
    address = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or address.hostname is None:
        return False
    proxies = {} if proxy_bypass(address.hostname) else getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy is not None and proxy.startswith("socks"):
        return True  # which urllib does not speak: the hub's library finds out
    # Who answers is for that library to check, with certificates that we need not know of: nothing is told here.
    anybody = ssl._create_unverified_context()  # noqa: S323
    opener = build_opener(ProxyHandler({address.scheme: proxy} if proxy else {}), HTTPSHandler(context=anybody))
    try:
        opener.open(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_S).close()  # noqa: S310 - http(s), as set
    except HTTPError as error:
        with error:
            return error.code < FIRST_SERVER_ERROR
    except (OSError, HTTPException):
        return False
    return True


def _check_safetensors(file: Path) -> None:
    """Reads the header only: 8 bytes of length, then JSON; after it the tensors (huggingface.co/docs/safetensors)."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_size <= size - 8:
            raise ModelError(f"{file} is cut off or no safetensors file: its header does not fit into its {size} bytes")
        try:
            tensors = json.loads(stream.read(header_size))
        except ValueError as error:
            raise ModelError(f"{file} is no safetensors file: its header is no JSON") from error
    if not isinstance(tensors, dict):
        raise ModelError(f"{file} is damaged: its header is no table of tensors. {_AGAIN}")
    tensors.pop("__metadata__", None)
    for name, tensor in tensors.items():
        if not _is_described(tensor):
            raise ModelError(f"{file} is damaged: its header does not say where {name} lies. {_AGAIN}")
    expected = 8 + header_size + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    if size < expected:
        raise ModelError(f"{file} is cut off: it has {size} bytes of {expected}. {_AGAIN}")
    for name, tensor in tensors.items():
        # Tables and masks of whole numbers are common; matrices of them are quantised weights.
        if name.endswith("weight") and len(tensor["shape"]) > 1 and tensor["dtype"] not in _FLOATS:
            raise ModelError(
                f"{file} stores {name} as {tensor['dtype']}: quantised weights are loaded from GGUF files only. Take "
                "the model in float32, bfloat16 or float16, or as GGUF"
            )


def _is_described(tensor: Any) -> bool:
    """Whether that is a tensor's entry: its dtype, its shape, and where it begins and ends."""
    if not isinstance(tensor, dict) or not isinstance(tensor.get("dtype"), str):
        return False
    shape, offsets = tensor.get("shape"), tensor.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(isinstance(number, int) and number >= 0 for number in [*shape, *offsets])


def _shards(index: Path) -> list[str]:
    """The files that an index names."""
    content = _read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(f"{index} is damaged: it does not say in which files the tensors are. {_AGAIN}")
    return sorted(set(files.values()))


def _check_gguf(file: Path) -> None:
    """Reads the table of tensors, which says how long the file has to be."""
    size = file.stat().st_size
    damaged = f"the GGUF file {file} is cut off or damaged"
    try:
        header = GgufHeader.from_file(str(file))
        facts, names = read_gguf_metadata(str(file))
    except Exception as error:  # of any kind: bytes are taken for lengths and kinds that they are not
        if size < _GGUF_HEADER or isinstance(error, UnicodeError) or not isinstance(error, ValueError):
            raise ModelError(f"{damaged}: its table of tensors cannot be read. {_AGAIN}") from error
        reason = str(error).rstrip(".")  # a sentence of the reader's, about what it does not know
        reason = reason if str(file) in reason else f"the GGUF file {file} cannot be read: {reason}"
        raise ModelError(f"{reason}. Take another file, or the model as safetensors") from error
    expected = max((header.data_start + tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    if size < expected:
        raise ModelError(f"{damaged}: it has {size} bytes of {expected}. {_AGAIN}")
    # transformers leaves out what it has no place for, and does not say so.
    num_layers = facts.get(f"{header.architecture}.block_count")
    numbers = [(int(found[1]), name) for name in names if (found := re.match(r"blk\.(\d+)\.", name))]
    beyond = sorted((number, name) for number, name in numbers if isinstance(num_layers, int) and number >= num_layers)
    if beyond:
        raise ModelError(
            f"the GGUF file {file} has more layers than it says ({num_layers}): there are {len(beyond)} tensors "
            f"beyond, the first is {beyond[0][1]}. {_AGAIN}"
        )


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is cut off or damaged: it is no JSON. {_AGAIN}") from error
