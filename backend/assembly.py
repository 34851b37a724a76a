"""Where the parts of one worker meet: files in, a Model that can serve out.

The only module that knows the engine, the runner, the models and the text side at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .deferred import complete
from .embedder import Embedder, NoEmbedder
from .embedding_model import NoPrompts, NoRunner, load_embedder
from .engine.batch import BlockGroups, Runner
from .engine.engine import Engine
from .engine.scheduler import Scheduler, SchedulerConfig
from .kv_memory import KVMemory, Pages
from .models.adapters import named_adapters, with_adapters
from .models.checkpoint import BadModel, Checkpoint, UnsupportedModel, checkpoint_of
from .models.container import Container, open_container
from .models.encoder_config import is_encoder
from .prompt import PromptBuilder, RequestRefused
from .protocol import Load, Ready, Tokenize, Tokenized
from .resident import trim_heap
from .runner.model_runner import ModelRunner, NoMemory
from .runner.prefix_files import PrefixFiles
from .text.chat_template import ChatTemplate, TemplateError, load_chat_template
from .text.gguf_vocabulary import TokenizerError
from .text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("llmd.worker")

Progress = Callable[[float, str], None]  # fraction of the load that is done, what is being done

DEFAULT_BATCH_TOKENS = 2048  # of one step; the scheduler shrinks it while streams decode
GPU_BATCH_TOKENS = 8192  # likewise, where a GPU computes
MAX_DRAFTS = 8  # per sequence; only where many rows of a step equal one row bit for bit


class LoadedRunner(Runner, Protocol):
    """What is asked of a runner beside its steps."""

    weights_bytes: int
    weights_vram_bytes: int  # the part of them on GPUs
    context_length: int
    details: dict[str, Any]  # for `show --verbose` and the log
    groups: BlockGroups

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def pages(self) -> Pages: ...


@dataclass(slots=True)
class Model:
    """A loaded model and all that serves it. Owner: the worker."""

    load: Load
    tokenizer: Tokenizer
    prompts: PromptBuilder
    engine: Engine
    runner: Runner
    ready: Ready

    memory: KVMemory
    embedder: Embedder | NoEmbedder
    adapters: tuple[str, ...] = ()  # that a request may name

    @property
    def kv_bytes(self) -> int:
        """Physical memory that the KV cache holds now."""
        return self.memory.num_bytes

    def tokenize(self, request: Tokenize) -> Tokenized:
        """Raises RequestRefused for ids outside the vocabulary or a template's refusal."""
        if request.token_ids is not None:
            ids = self.prompts.checked(request.token_ids)
            return Tokenized(request.id, ids, self.tokenizer.decode(ids))
        text = request.text or ""
        if request.messages is not None:
            text = self.prompts.render(request.messages, request.tools, self.prompts.template, {})
        return Tokenized(request.id, self.prompts.encode(text, request.add_bos), text)

    def check_adapter(self, name: str) -> None:
        """Raises RequestRefused unless a request may name this adapter; "" is none."""
        if name and name not in self.adapters:
            shown = ", ".join(self.adapters) or "none"
            raise RequestRefused(
                "bad_request", f"{self.load.name} has no adapter {name}; it has: {shown}"
            )

    def close(self) -> None:
        """The worker ends: nothing of the model is needed any more."""
        self.memory.save_all()
        log.info("%s ends: %r, %r", self.load.name, self.engine, self.memory)


def load_model(load: Load, progress: Progress) -> Model:
    """Read the model's files and make it ready.

    Raises RequestRefused with one clear sentence if the files are damaged, of a kind that is not
    supported, or too big for the memory there is.
    """
    started = time.monotonic()
    try:
        model = _assemble(load, progress)
    except UnsupportedModel as error:
        raise RequestRefused("unsupported", str(error)) from error
    except (BadModel, TokenizerError, TemplateError) as error:
        raise RequestRefused("bad_model", str(error)) from error
    except (NoMemory, MemoryError) as error:
        raise RequestRefused("no_memory", str(error)) from error
    log.info("%s is ready after %.1f s: %s", load.name, time.monotonic() - started, model.ready)
    return model


def _assemble(load: Load, progress: Progress) -> Model:
    progress(0.0, "opening")
    container = open_container(load.files)
    if is_encoder(container.config, container.metadata, load.files):
        if any(file.role == "adapter" for file in load.files):
            raise UnsupportedModel("adapters of embedding models are not supported")
        return _assemble_encoder(load, container, progress)
    checkpoint = with_adapters(checkpoint_of(container), load.files)
    checkpoint.config = checkpoint.config.serving(load.context_length)
    tokenizer = load_tokenizer(load.files, load.cache_dir, container.metadata)
    container.forget_vocabulary()
    trim_heap()  # a large vocabulary leaves as much behind as it keeps, and the weights come now
    progress(0.05, "reading weights")
    runner = _open_runner(checkpoint, load, lambda part, stage: progress(0.05 + 0.9 * part, stage))
    engine = Engine(
        Scheduler(
            SchedulerConfig(
                num_blocks=runner.num_blocks,
                block_size=runner.block_size,
                max_num_seqs=load.max_num_seqs,
                max_batch_tokens=load.max_batch_tokens
                or (GPU_BATCH_TOKENS if _wants_devices(load) else DEFAULT_BATCH_TOKENS),
                prefill_chunk=load.prefill_chunk,
                max_drafts=MAX_DRAFTS if runner.details.get("kernels") == "compiled" else 0,
                groups=runner.groups,
                cache_seed=f"{load.digest}/{runner.details.get('dtype', '')}".encode(),
            )
        ),
        runner,
    )
    context_length = min(runner.context_length, engine.max_sequence_tokens)
    template = _template(load, tokenizer, checkpoint.metadata)
    builder = PromptBuilder(tokenizer, template, checkpoint.config.architecture, context_length)
    ready = Ready(
        context_length=context_length,
        trained_context_length=checkpoint.config.context_length,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        block_bytes=runner.block_bytes,
        block_groups=runner.groups.num_groups,
        weights_bytes=runner.weights_bytes,
        weights_vram_bytes=runner.weights_vram_bytes,
        dtype=str(runner.details.get("dtype", "")),
        capabilities=_capabilities(template),
        vocab_size=tokenizer.vocab_size,
        details=dict(runner.details),
    )
    let_go = runner.rest if isinstance(runner, ModelRunner) else _nothing
    memory = KVMemory(engine, runner.pages, _prefix_files(load, checkpoint, runner), let_go)
    progress(1.0, "ready")
    embedder = NoEmbedder(load.name)
    adapters = named_adapters(checkpoint)
    return Model(load, tokenizer, builder, engine, runner, ready, memory, embedder, adapters)


def _open_runner(checkpoint: Checkpoint, load: Load, progress: Progress) -> LoadedRunner:
    """The CPU's, or one for the devices that the load names. Nothing of the latter, nor Triton, is
    imported where it is not wanted."""
    if not _wants_devices(load):
        return ModelRunner(checkpoint, load, progress)
    complete()  # of what torch does on a GPU not all was tried without
    from .runner.gpu_open import open_gpu_runner, why_not_on_devices

    reason = why_not_on_devices(checkpoint.config)
    if named_adapters(checkpoint):
        reason = "adapters by request"
    if reason:
        log.warning("%s stays on the CPU: %s do not run elsewhere so far", load.name, reason)
        return ModelRunner(checkpoint, load, progress)
    return open_gpu_runner(checkpoint, load, progress)


def _wants_devices(load: Load) -> bool:
    return any(part.device != "cpu" for part in load.parts)


def _assemble_encoder(load: Load, container: Container, progress: Progress) -> Model:
    """A model that makes vectors; its engine never has work."""
    tokenizer = load_tokenizer(load.files, load.cache_dir, container.metadata)
    embedder, ready = load_embedder(load, container, tokenizer, progress)
    runner = NoRunner()
    engine = Engine(Scheduler(SchedulerConfig(num_blocks=1, block_size=1)), runner)
    prompts = NoPrompts(load.name, tokenizer, ready.context_length)
    memory = KVMemory(engine, runner, None)
    progress(1.0, "ready")
    return Model(load, tokenizer, prompts, engine, runner, ready, memory, embedder)


def _prefix_files(load: Load, checkpoint: Checkpoint, runner: LoadedRunner) -> PrefixFiles | None:
    """Where this model's prefix blocks outlive its worker; None if they are not to."""
    if not (load.cache_dir and load.prefix_budget_bytes):
        return None
    meaning = (
        load.digest,
        repr(checkpoint.config),  # rope settings among them
        runner.details.get("dtype"),
        runner.details.get("kernels"),
        runner.block_size,
        runner.block_bytes,
    )
    return PrefixFiles(
        Path(load.cache_dir) / "prefixes", repr(meaning).encode(), load.prefix_budget_bytes
    )


def _template(load: Load, tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> ChatTemplate | None:
    if load.template:
        return ChatTemplate(load.template, tokenizer.special_tokens, tokenizer.control_tokens)
    return load_chat_template(
        load.files, metadata, tokenizer.special_tokens, tokenizer.control_tokens
    )


def _capabilities(template: ChatTemplate | None) -> list[str]:
    capabilities = ["completion"]
    if template is not None and template.supports_tools:
        capabilities.append("tools")
    if template is not None and template.supports_thinking:
        capabilities.append("thinking")
    return capabilities


def _nothing() -> None:
    """For runners that hold nothing between steps."""
