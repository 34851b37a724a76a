"""Tiny checkpoints of every family, made and saved by transformers, and what transformers says.

A case is a configuration class with a few sizes; the weights are random but of a size that makes
logits differ. `Oracle` runs the saved model here and there and compares logits at every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmd.backend.engine.batch import Batch, StepResult
from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.models.checkpoint import open_checkpoint
from llmd.backend.protocol import Load, ModelFile, SamplingParams
from llmd.backend.runner.model_runner import ModelRunner

from .family_gguf import write_gguf

NUM_STEPS = 32  # greedy
TOLERANCE = 1e-4  # of the range of a position's logits
VOCABULARY = 320

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One row of the table in docs/families.md."""

    name: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    gguf: str = ""  # the architecture's name there, where the suite also writes a GGUF
    served: int = 0  # the context length that the model is loaded with; 0: all of it

    def __str__(self) -> str:
        return self.name


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 24}


def _rope(kind: str, **rest: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **rest}}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
_GEMMA4 = {
    **_WINDOW,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CASES = [
    Case("Llama", "llama", gguf="llama"),
    Case("Llama, biases", "llama", {"attention_bias": True, "mlp_bias": True}, gguf="llama"),
    Case("Llama, linear RoPE", "llama", _rope("linear", factor=4.0)),
    Case(
        "Llama 3 RoPE",
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    Case(
        "Llama, YaRN",
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    Case("Llama, dynamic RoPE", "llama", _rope("dynamic", factor=2.0)),
    Case("Mistral, window", "mistral", _WINDOW),
    Case(
        "Ministral 3",
        "ministral3",
        _rope(
            "yarn",
            factor=16.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32.0,
            beta_slow=1.0,
            llama_4_scaling_beta=0.1,
        ),
        gguf="mistral3",
    ),
    Case("Mixtral", "mixtral", {"num_local_experts": 8}, gguf="llama"),
    Case("Qwen2", "qwen2", gguf="qwen2"),
    Case(
        "Qwen2, window from layer 2",
        "qwen2",
        {**_WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    ),
    Case(
        "Qwen2-MoE",
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 48},
        gguf="qwen2moe",
    ),
    Case("Qwen3", "qwen3", gguf="qwen3"),
    Case("Qwen3-MoE", "qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}, gguf="qwen3moe"),
    Case("Gemma", "gemma", gguf="gemma"),
    Case("Gemma 2", "gemma2", {**_WINDOW, "query_pre_attn_scalar": 16}, gguf="gemma2"),
    Case("Gemma 2, a scale of its own", "gemma2", {**_WINDOW, "query_pre_attn_scalar": 24}),
    Case(
        "Gemma 3",
        "gemma3_text",
        {**_WINDOW, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
        gguf="gemma3",
    ),
    Case(
        "Gemma 4, dense",
        "gemma4_text",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
        gguf="gemma4",
    ),
    Case(
        "Gemma 4, layer inputs, shared keys",
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        gguf="gemma4",
    ),
    Case(
        "Gemma 4, experts",
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        gguf="gemma4",
    ),
    Case("Phi-3", "phi3", _WINDOW, gguf="phi3"),
    Case(
        "Phi-3, LongRoPE, long",
        "phi3",
        {"original_max_position_embeddings": 16, "rope_parameters": _LONGROPE},
        gguf="phi3",
    ),
    Case(
        "Phi-3, LongRoPE, short",
        "phi3",
        {"original_max_position_embeddings": 128, "rope_parameters": _LONGROPE},
        served=128,
    ),
    Case(
        "gpt-oss",
        "gpt_oss",
        {
            **_WINDOW,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        },
        gguf="gpt-oss",
    ),
    Case(
        "Granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
        gguf="granite",
    ),
    Case("SmolLM3", "smollm3", gguf="smollm3"),
    Case("OLMo 2", "olmo2", gguf="olmo2"),
    Case("OLMo 3", "olmo3", _WINDOW, gguf="olmo2"),
    Case("Cohere 2", "cohere2", _WINDOW, gguf="cohere2"),
    Case("GLM-4", "glm4", {"attention_bias": True}, gguf="glm4"),
    Case(
        "LFM2",
        "lfm2",
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 32},
        gguf="lfm2",
    ),
    Case(
        "Qwen3-Next",
        "qwen3_next",
        {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 48},
        gguf="qwen3next",
    ),
    Case("Qwen3.5", "qwen3_5_text", {**_DELTA, "head_dim": 32}, gguf="qwen35"),
    Case(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 48},
        gguf="qwen35moe",
    ),
]


def make_model(case: Case, folder: Path) -> Any:
    """The transformers model, saved into the folder; its weights depend on the case alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(case.model_type, **{**_SIZES, **case.changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if "norm" in name:  # around what it was: 1, or 0 where the model adds 1
                parameter.add_(0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            elif parameter.dim() < 2:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.eval()
    model.save_pretrained(folder)
    return model


def load_files(folder: Path) -> list[ModelFile]:
    """The files of a folder with the roles that matter here."""
    roles = {".safetensors": "weights", ".gguf": "weights", ".json": "config"}
    return [
        ModelFile(path.name, roles[path.suffix], str(path))
        for path in sorted(folder.iterdir())
        if path.suffix in roles
    ]


class WatchedRunner(ModelRunner):
    """Remembers the logits of every position that a token was drawn at, by prompt."""

    def __init__(self, folder: Path, served: int = 0) -> None:
        load = Load(
            name="tiny", digest="tiny", files=load_files(folder), dtype="float32", num_threads=1,
            kv_budget_bytes=64 << 20,
        )  # fmt: skip
        checkpoint = open_checkpoint(load.files)
        checkpoint.config = checkpoint.config.serving(served)
        super().__init__(checkpoint, load, lambda share, stage: None)
        self._prompts: dict[int, Prompt] = {}
        self.logits: dict[Prompt, dict[int, np.ndarray]] = {}

    def execute(self, batch: Batch) -> StepResult:
        for start in batch.starts:
            self._prompts[start.row] = start.token_ids[: start.num_prompt_tokens]
        return super().execute(batch)

    def _sample(self, batch: Batch, logits: np.ndarray) -> StepResult:
        drawing = [chunk for chunk in batch.chunks if chunk.samples]
        for chunk, row in zip(drawing, logits, strict=True):
            seen = self.logits.setdefault(self._prompts[chunk.row], {})
            seen[chunk.start + chunk.num_tokens - 1] = row.copy()
        return super()._sample(batch, logits)


class Oracle:
    """One saved model, here and in transformers."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self._folder = folder
        self._model = make_model(case, folder)
        self._wanted: dict[Prompt, np.ndarray] = {}
        self.runner = WatchedRunner(folder, case.served)

    def use_gguf(self, folder: Path) -> None:
        """From now on the runner reads the same weights from a GGUF."""
        write_gguf(self.case.gguf, self._folder, folder)
        self.runner = WatchedRunner(folder, self.case.served)

    def engine(self, prefill_chunk: int = 0) -> Engine:
        """A fresh engine over the same runner: no prefix is known to it."""
        runner = self.runner
        runner.logits.clear()
        config = SchedulerConfig(
            num_blocks=min(runner.num_blocks, 512),
            block_size=runner.block_size,
            max_num_seqs=8,
            prefill_chunk=prefill_chunk,
            groups=runner.groups,
        )
        return Engine(Scheduler(config), runner)

    def run(self, engine: Engine, prompts: Sequence[Prompt], preempt_at: int = 0) -> int:
        """Continue the prompts greedily, compare every logit; how many tokens were cached.

        `preempt_at` steps after the start the first sequence loses its blocks.
        """
        for index, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0)
            engine.add(EngineRequest(str(index), prompt, len(prompt), NUM_STEPS, sampling))
        drawn: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        num_cached = num_steps = num_preemptions = 0
        while engine.has_work:
            for output in engine.step():
                assert not output.error, output.error
                drawn[output.id].extend(output.token_ids)
                num_cached = max(num_cached, output.num_cached_tokens)
                num_preemptions = max(num_preemptions, output.num_preemptions)
            num_steps += 1
            if num_steps == preempt_at:
                assert engine.force_preempt("0")
        assert num_preemptions == (1 if preempt_at else 0)
        for index, prompt in enumerate(prompts):
            self._compare(prompt, drawn[str(index)])
        return num_cached

    def _compare(self, prompt: Prompt, drawn: list[int]) -> None:
        assert len(drawn) == NUM_STEPS
        wanted = self._logits_of((*prompt, *drawn[:-1]))
        found = self.runner.logits[prompt]
        for step, token_id in enumerate(drawn):
            position = len(prompt) - 1 + step
            expected = wanted[position]
            limit = TOLERANCE * float(expected.max() - expected.min())
            error = float(np.abs(found[position] - expected).max())
            assert error <= limit, f"position {position}: off by {error}, {limit} allowed"
            assert expected.max() - expected[token_id] <= 2 * limit  # greedy, up to ties

    def _logits_of(self, token_ids: Prompt) -> np.ndarray:
        if token_ids not in self._wanted:
            with torch.inference_mode():
                output = self._model(torch.tensor([token_ids]), use_cache=False)
            self._wanted[token_ids] = output.logits[0].numpy()
        return self._wanted[token_ids]


def prompt_of(length: int, seed: int) -> Prompt:
    """Random ids, none of them special."""
    rng = np.random.default_rng(seed)
    return tuple(int(token) for token in rng.integers(3, VOCABULARY, length))
