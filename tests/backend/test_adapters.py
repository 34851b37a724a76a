"""LoRA adapters: merged they equal changed weights, by request they do not disturb each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.models.adapters import AdaptedCheckpoint, named_adapters, with_adapters
from llmd.backend.models.checkpoint import Checkpoint, open_checkpoint
from llmd.backend.models.config import BadModel, UnsupportedModel
from llmd.backend.protocol import Load, ModelFile, SamplingParams
from llmd.backend.runner.model_runner import ModelRunner

RANK, ALPHA, HEADS, KV_HEADS, HEAD_DIM = 4, 16.0, 4, 2, 16
SHAPES = {  # outputs, inputs
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
Pairs = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama as transformers saves it."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def files_of(folder: Path) -> list[ModelFile]:
    return [
        ModelFile("config.json", "config", str(folder / "config.json")),
        ModelFile("model.safetensors", "weights", str(folder / "model.safetensors")),
    ]


def random_pairs(seed: int, parts: tuple[str, ...] = tuple(SHAPES)) -> Pairs:
    """A and B for these matrices of both layers, by canonical names."""
    random = torch.Generator().manual_seed(seed)
    made: Pairs = {}
    for index in range(2):
        for part in parts:
            outputs, inputs = SHAPES[part]
            down = torch.randn((RANK, inputs), generator=random) * 0.1
            made[f"model.layers.{index}.{part}"] = (
                down,
                torch.randn((outputs, RANK), generator=random) * 0.1,
            )
    return made


def peft(folder: Path, pairs: Pairs, prefix: str = "adapter", **settings: Any) -> list[ModelFile]:
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, (down, up) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    names = ("adapter_config.json", "adapter_model.safetensors")
    return [ModelFile(f"{prefix}/{name}", "adapter", str(folder / name)) for name in names]


GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_adapter(path: Path, pairs: Pairs, kind: str = "lora") -> list[ModelFile]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, (down, up) in pairs.items():
        _, _, index, part = name.split(".", 3)
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
        if heads is not None:  # rows in adjacent pairs, as the converter writes them for Llama
            up = up.view(heads, 2, HEAD_DIM // 2, RANK).transpose(1, 2).reshape(up.shape)
        stem = f"blk.{index}.{GGUF_PARTS[part]}.weight"
        writer.add_tensor(f"{stem}.lora_a", down.numpy())
        writer.add_tensor(f"{stem}.lora_b", up.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [ModelFile("adapter/adapter.gguf", "adapter", str(path))]


def adapted(base: Path, *adapters: list[ModelFile]) -> Checkpoint:
    files = [*files_of(base), *(file for each in adapters for file in each)]
    return with_adapters(open_checkpoint(files), files)


def check_merged(base: Path, checkpoint: Checkpoint, pairs: Pairs, scale: float) -> None:
    plain = open_checkpoint(files_of(base))
    for index in range(2):
        for part in SHAPES:
            name = f"model.layers.{index}.{part}"
            wanted = plain.tensor(f"{name}.weight", torch.float32)
            if name in pairs:
                wanted = wanted + scale * pairs[name][1] @ pairs[name][0]
            found = checkpoint.tensor(f"{name}.weight", torch.float32)
            assert torch.allclose(found, wanted, atol=1e-6), name
            assert checkpoint.blocks(f"{name}.weight") is None
    embedding = checkpoint.tensor("model.embed_tokens.weight", torch.float32)
    assert torch.equal(embedding, plain.tensor("model.embed_tokens.weight", torch.float32))


def test_an_adapter_of_the_model_is_merged_into_its_weights(base: Path, tmp_path: Path) -> None:
    pairs = random_pairs(2, ("self_attn.q_proj", "mlp.down_proj"))
    checkpoint = adapted(base, peft(tmp_path / "a", pairs))
    check_merged(base, checkpoint, pairs, ALPHA / RANK)
    assert named_adapters(checkpoint) == ()


def test_the_scale_follows_the_settings(base: Path, tmp_path: Path) -> None:
    pairs = random_pairs(3, ("self_attn.v_proj",))
    check_merged(base, adapted(base, peft(tmp_path / "a", pairs, use_rslora=True)), pairs, 8.0)
    pattern = {"v_proj": 2.0}
    check_merged(
        base, adapted(base, peft(tmp_path / "b", pairs, alpha_pattern=pattern)), pairs, 0.5
    )


def test_a_gguf_adapter_means_the_same(base: Path, tmp_path: Path) -> None:
    pairs = random_pairs(4)
    checkpoint = adapted(base, gguf_adapter(tmp_path / "a.gguf", pairs))
    check_merged(base, checkpoint, pairs, ALPHA / RANK)


def run(files: list[ModelFile], asked: Mapping[str, str]) -> dict[str, list[tuple[int, float]]]:
    """Greedy texts of one batch, as (token, logprob): for each id the adapter that it names."""
    checkpoint = with_adapters(open_checkpoint(files), files)
    load = Load("m", "d", files, dtype="float32", num_threads=1, kv_budget_bytes=1 << 24)
    runner = ModelRunner(checkpoint, load, lambda share, stage: None)
    config = SchedulerConfig(runner.num_blocks, runner.block_size)
    engine = Engine(Scheduler(config), runner)
    for id, adapter in asked.items():
        prompt = tuple(range(3, 20))  # the same for all: prefixes must not be shared
        sampling = SamplingParams(temperature=0.0, num_logprobs=0)
        engine.add(
            EngineRequest(id, prompt, len(prompt), 12, sampling, 0, frozenset(), adapter=adapter)
        )
    found: dict[str, list[tuple[int, float]]] = {id: [] for id in asked}
    while engine.has_work:
        for output in engine.step():
            chosen = [entry.chosen for entry in output.logprobs]
            found[output.id].extend(zip(output.token_ids, chosen, strict=True))
    return found


def test_two_adapters_and_the_bare_model_in_one_batch_give_what_each_gives_alone(
    base: Path, tmp_path: Path
) -> None:
    some = random_pairs(5, ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"))
    files = [
        *files_of(base),
        *peft(tmp_path / "x", some, "adapter-x"),
        *peft(tmp_path / "y", random_pairs(6), "adapter-y"),
    ]
    together = run(files, {"bare": "", "one": "x", "two": "y", "three": "x"})
    check_same(together["one"], together["three"])
    for id, adapter in {"bare": "", "one": "x", "two": "y"}.items():
        check_same(run(files, {id: adapter})[id], together[id])
    assert len({tuple(token for token, _ in together[id]) for id in ("bare", "one", "two")}) == 3
    # ... and what an adapter gives as a part of the model
    merged = [*files_of(base), *peft(tmp_path / "y", random_pairs(6))]
    check_same(run(merged, {"two": ""})["two"], together["two"])


def check_same(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> None:
    assert [token for token, _ in found] == [token for token, _ in wanted]
    assert [value for _, value in found] == pytest.approx([v for _, v in wanted], abs=1e-5)


def test_named_and_merged_adapters_are_told_apart_by_their_folders(
    base: Path, tmp_path: Path
) -> None:
    pairs = random_pairs(7, ("self_attn.o_proj",))
    both = adapted(base, peft(tmp_path / "a", pairs), peft(tmp_path / "b", pairs, "adapter-b"))
    assert named_adapters(both) == ("b",)
    assert isinstance(both, AdaptedCheckpoint)
    check_merged(base, both, pairs, ALPHA / RANK)


def test_an_adapter_for_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    pairs = random_pairs(8, ("self_attn.q_proj",))
    deep = {name.replace("layers.1", "layers.7"): pair for name, pair in pairs.items()}
    with pytest.raises(UnsupportedModel, match=r"layers\.7\.self_attn\.q_proj.*2 layers"):
        adapted(base, peft(tmp_path / "a", deep))
    wide = {name: (torch.zeros(RANK, 80), up) for name, (_, up) in pairs.items()}
    with pytest.raises(BadModel, match=r"for another model.*\(64, 80\), which is \(64, 64\)"):
        adapted(base, peft(tmp_path / "b", wide)).tensor(
            f"{next(iter(wide))}.weight", torch.float32
        )
    head = {"lm_head": (torch.zeros(RANK, 64), torch.zeros(128, RANK))}
    with pytest.raises(UnsupportedModel, match="changes lm_head, which is not"):
        adapted(base, peft(tmp_path / "c", head))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "of the kind DoRA; LORA is supported"),
        ({"peft_type": "IA3"}, "of the kind IA3; LORA is supported"),
        ({"bias": "all"}, "more than matrices"),
        ({"modules_to_save": ["lm_head"]}, "more than matrices"),
    ],
)
def test_what_is_more_than_lora_is_refused(
    settings: dict[str, Any], says: str, base: Path, tmp_path: Path
) -> None:
    pairs = random_pairs(9, ("self_attn.q_proj",))
    with pytest.raises(UnsupportedModel, match=says):
        adapted(base, peft(tmp_path / "a", pairs, **settings))


def test_damage_is_named(base: Path, tmp_path: Path) -> None:
    pairs = random_pairs(10, ("self_attn.q_proj",))
    with pytest.raises(BadModel, match=r"no adapter_config\.json"):
        adapted(base, peft(tmp_path / "a", pairs)[1:])
    with pytest.raises(BadModel, match="has no weights"):
        adapted(base, peft(tmp_path / "a", pairs)[:1])
    with pytest.raises(BadModel, match="is a GGUF, but no LoRA adapter"):
        adapted(base, gguf_adapter(tmp_path / "b.gguf", pairs, kind="control"))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    files = peft(tmp_path / "c", pairs)
    save_file({name: torch.zeros(RANK, 64)}, files[1].path)
    with pytest.raises(BadModel, match=r"no tensor .*q_proj\.lora_B\.weight"):
        adapted(base, files)
    save_file({"strange.weight": torch.zeros(4)}, files[1].path)
    with pytest.raises(UnsupportedModel, match=r"a tensor strange\.weight, which is not known"):
        adapted(base, files)
