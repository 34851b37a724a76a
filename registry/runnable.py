"""Whether llmd can run a model, told from its first bytes, before gigabytes come for nothing.

    GGUF          the header, as soon as so much of it is there: architecture, then tensor types
    safetensors   config.json, which is fetched before the weights

The lists are those that the backend reads (formats/architectures.py) and those of its encoders and
tensor readers, which import torch and are therefore named here again; tests compare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .details import read_json_object
from .errors import BadModelFile, Unsupported
from .formats import architectures, gguf, quantization
from .formats.errors import FormatError

GGUF_ENCODERS = ("bert", "nomic-bert", "modern-bert", "gemma-embedding")
SAFETENSORS_ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "nomic_bert", "modernbert")
TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)


def check_gguf_start(data: bytes, file_size: int, name: str) -> bool:
    """Whether these first bytes suffice for an answer, which is then yes.

    Raises Unsupported, or BadModelFile if it is no GGUF at all.
    """
    try:
        found = gguf.read_start(data, file_size, name)
    except FormatError as error:
        raise BadModelFile(str(error)) from None
    if found is None:
        return False
    architecture = found if isinstance(found, str) else found.architecture
    if architecture and architecture not in GGUF_ENCODERS:
        _refuse(architecture, architectures.GGUF, name)
    if isinstance(found, str):
        return False
    wrong = {tensor.type for tensor in found.tensors.values()} - set(TENSOR_TYPES)
    if wrong:
        raise Unsupported(
            f"{name} cannot be run: its tensors of type {', '.join(sorted(wrong))} are not "
            f"supported; supported are {', '.join(TENSOR_TYPES)}"
        )
    return True


def check_config(path: Path, name: str) -> None:
    """Raises Unsupported if the model of this config.json cannot be run, BadModelFile if it is
    none."""
    config = read_json_object(path, "config.json")
    inner = config.get("text_config")
    kinds = [_kind(config), _kind(inner) if isinstance(inner, dict) else ""]
    known = {*architectures.SAFETENSORS, *SAFETENSORS_ENCODERS}
    if not known & set(kinds):
        _refuse(kinds[0], architectures.SAFETENSORS, name)
    if sentence := quantization.unsupported(config):
        raise Unsupported(f"{name} cannot be run: {sentence}")


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type") or "")


def _refuse(architecture: str, supported: dict[str, str], name: str) -> None:
    if sentence := architectures.unsupported(architecture, supported):
        raise Unsupported(f"{name} cannot be run: {sentence}")
