"""Text encoders: equal to transformers' own, alone and in any batch; damage is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from llmd.backend.models.config import BadModel, UnsupportedModel
from llmd.backend.models.container import open_container
from llmd.backend.models.encoder import Encoder
from llmd.backend.models.encoder_config import encoder_config, is_encoder
from llmd.backend.protocol import ModelFile

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 300,
    "pad_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"max_position_embeddings": 302},
    "nomic_bert": {},
    "modernbert": {"local_attention": 16, "num_hidden_layers": 5, "cls_token_id": 3},
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "use_bidirectional_attention": True,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 16,
    },
}


def files_of(folder: Path) -> list[ModelFile]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [
        ModelFile(
            path.relative_to(folder).as_posix(),
            "weights" if path.name == "model.safetensors" else "other",
            str(path),
        )
        for path in paths
    ]


def saved(kind: str, folder: Path) -> Any:
    """A random model of this kind, as transformers saves it; the model itself."""
    torch.manual_seed(sum(kind.encode()))
    ids = {"bos_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
    config = AutoConfig.for_model(kind, **{**SIZES, **ids, **FAMILIES[kind]})
    model = AutoModel.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases are ones and zeros, which would hide mistakes
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if kind == "gemma3_text":  # transformers writes half the window that it read
        path = folder / "config.json"
        raw = json.loads(path.read_text()) | {"sliding_window": 16}
        path.write_text(json.dumps(raw))
    return model


def opened(folder: Path) -> Encoder:
    container = open_container(files_of(folder))
    return Encoder(container, encoder_config(container.config, container.metadata), torch.float32)


def states_of(encoder: Encoder, texts: list[list[int]]) -> list[Tensor]:
    run = encoder.run(texts)
    while True:
        try:
            next(run)
        except StopIteration as end:
            states: list[Tensor] = end.value
            return states


@pytest.mark.parametrize("kind", FAMILIES)
def test_states_equal_those_of_transformers_alone_and_in_a_batch(kind: str, tmp_path: Path) -> None:
    model, encoder = saved(kind, tmp_path), opened(tmp_path)
    lengths = (1, 2, 7, 33, 7, 70, 120)  # windows are crossed
    texts = [torch.randint(4, 97, (length,)).tolist() for length in lengths]
    batched = states_of(encoder, texts)
    for ids, found in zip(texts, batched, strict=True):
        with torch.inference_mode():
            wanted = model(
                input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))
            ).last_hidden_state[0]
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
        assert torch.equal(states_of(encoder, [ids])[0], found)


def test_a_folder_with_modules_is_an_encoder_whatever_its_kind(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    config = {"model_type": "qwen3"}
    assert not is_encoder(config, {}, files_of(tmp_path))
    (tmp_path / "modules.json").write_text("[]")
    assert is_encoder(config, {}, files_of(tmp_path))
    assert is_encoder({"model_type": "bert"}, {}, [])
    assert is_encoder({}, {"general.architecture": "qwen3", "qwen3.pooling_type": 3}, [])
    assert not is_encoder({}, {"general.architecture": "qwen3"}, [])


def test_an_unsupported_encoder_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"deberta.*bert.*modernbert.*qwen3"):
        encoder_config({"model_type": "deberta"}, {})
    with pytest.raises(UnsupportedModel, match=r"t5encoder.*nomic-bert"):
        encoder_config({}, {"general.architecture": "t5encoder"})
    with pytest.raises(UnsupportedModel, match=r"relative.*absolute|absolute"):
        encoder_config({"model_type": "bert", "position_embedding_type": "relative_key"}, {})


def test_a_missing_key_and_a_missing_or_misshapen_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="hidden_size"):
        encoder_config({"model_type": "bert", "num_attention_heads": 4}, {})
    saved("bert", tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"num_hidden_layers": 5}))
    with pytest.raises(BadModel, match=r"encoder\.layer\.4\.attention\.self\.query\.weight"):
        opened(tmp_path)
    path.write_text(json.dumps(raw | {"intermediate_size": 128}))
    with pytest.raises(BadModel, match=r"intermediate\.dense\.weight.*\(96, 64\).*\(128, 64\)"):
        opened(tmp_path)
