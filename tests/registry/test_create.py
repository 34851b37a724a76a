"""Modelfiles, and models made out of others."""

from __future__ import annotations

import codecs
import hashlib
from pathlib import Path

import pytest

from llmd.registry.create import (
    BlobUpload,
    CreateRequest,
    create,
)
from llmd.registry.errors import BadRequest, DigestMismatch, ModelNotFound
from llmd.registry.modelfile import parse
from llmd.registry.names import ModelName
from llmd.registry.store import ModelStore

from . import model_makers as make

FULL = '''# a comment
FROM llama3.2:3b

parameter temperature 0.5
PARAMETER num_ctx 4096
PARAMETER stop "</s>"
PARAMETER stop <|end|>
PARAMETER temperature 0.7
Parameter mirostat 1
TEMPLATE """{{ if .System }}{{ .System }}
{{ end }}{{ .Prompt }}"""
SYSTEM "You are
two lines."
ADAPTER ./lora
LICENSE one
LICENSE """two
lines"""
MESSAGE user Hello # not a comment
MESSAGE assistant "Hi there"
REQUIRES v0.14.0
RENDERER qwen3
'''


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def test_a_whole_modelfile_is_read() -> None:
    found = parse(FULL)
    assert found.bases == ("llama3.2:3b",)
    assert found.params == {"temperature": 0.7, "num_ctx": 4096, "stop": ["</s>", "<|end|>"]}
    assert found.template == "{{ if .System }}{{ .System }}\n{{ end }}{{ .Prompt }}"
    assert found.system == "You are\ntwo lines."
    assert found.adapters == ("./lora",)
    assert found.licenses == ("one", "two\nlines")
    assert found.messages == (
        {"role": "user", "content": "Hello # not a comment"},
        {"role": "assistant", "content": "Hi there"},
    )
    assert (found.requires, found.renderer) == ("v0.14.0", "qwen3")
    assert found.warnings == ("warning: parameter mirostat is deprecated",)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks_are_understood(encoding: str) -> None:
    assert parse("FROM x\nSYSTEM ü".encode(encoding)).system == "ü"
    assert parse(codecs.BOM_UTF16_BE + "FROM y".encode("utf-16-be")).bases == ("y",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no FROM line"),
        ("# only\n\n", "no FROM line"),
        ("FROM x\n\nFORM y", r'\(line 3\): command must be one of "from", .*, or "requires"'),
        ('FROM x\nSYSTEM """a\nb', r"\(line 2\): unexpected end"),
        ("FROM x\nPARAMETER zoom 3", r"\(line 2\): unknown parameter 'zoom'"),
        ("FROM x\nPARAMETER top_k many", r"\(line 2\): parameter top_k has the wrong value"),
        ("FROM x\nPARAMETER top_k 1.5", "wrong value"),
        ("FROM x\nPARAMETER seed", r"\(line 2\): parameter seed has no value"),
        ("FROM x\nMESSAGE robot hi", "message role must be one of"),
        ("FROM x\nREQUIRES soon", "requires must be a valid semver"),
        ("FROM", r"\(line 1\): from has no value"),
        (b"FROM \xff", "neither UTF-8 nor UTF-16"),
    ],
)
def test_a_wrong_modelfile_is_refused_with_its_line(text: str | bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        parse(text)


def upload(store: ModelStore, content: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with BlobUpload(store, digest) as pieces:
        pieces.write(content[:10])
        pieces.write(content[10:])
        pieces.finish()
    return digest


def test_an_uploaded_gguf_becomes_a_model(store: ModelStore) -> None:
    digest = upload(store, make.tiny_gguf())
    statuses: list[str] = []
    request = CreateRequest(ModelName.parse("mine"), files={"m.gguf": digest}, system="Be brief.")

    def on_status(status: str, completed: int = 0, total: int = 0) -> None:
        statuses.append(status)

    manifest = create(store, request, on_status)
    assert manifest.family == "llama"
    assert manifest.system == "Be brief."
    assert statuses == [
        "parsing GGUF",
        f"using existing layer {digest}",
        "writing manifest",
        "success",
    ]
    assert store.get(ModelName.parse("mine")) == manifest
    store.check()


def test_a_child_shares_its_parents_files_and_overrides_its_settings(store: ModelStore) -> None:
    make.stored_model(store, "base")
    parent = create(
        store,
        CreateRequest(
            ModelName.parse("parent"),
            base="base",
            system="Old.",
            params={"temperature": 0.1, "top_k": 5},
            licenses=("A",),
            messages=({"role": "user", "content": "x"},),
        ),
    )
    child = create(
        store,
        CreateRequest(
            ModelName.parse("child"),
            base="parent",
            params={"temperature": 0.9, "stop": ["x"]},
            licenses=("B",),
            template="{% for m in messages %}{{ m.content }}{% endfor %}",
        ),
    )
    assert child.files == parent.files
    assert child.system == "Old."
    assert child.params == {"temperature": 0.9, "top_k": 5, "stop": ["x"]}
    assert child.license == "A\n\nB"
    assert child.parent == "parent:latest"
    assert child.template is not None and child.go_template is None
    assert list(child.messages) == [{"role": "user", "content": "x"}]
    assert child.digest != parent.digest
    store.delete(ModelName.parse("base"))
    store.delete(ModelName.parse("parent"))
    store.check()


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({}, BadRequest, "neither 'from' or 'files' was specified"),
        ({"files": {"../m.gguf": "sha256:" + "0" * 64}}, BadRequest, "must be relative"),
        ({"files": {"m.gguf": "0" * 64}}, BadRequest, "invalid digest format"),
        ({"files": {"m.gguf": "sha256:" + "0" * 64}}, ModelNotFound, "was not uploaded"),
        ({"base": "b", "params": {"zoom": 1}}, BadRequest, "unknown parameter 'zoom'"),
        ({"base": "b", "params": {"stop": [1]}}, BadRequest, "stop must be text"),
        ({"base": "mine", "template": "{{ if }}"}, BadRequest, "^template error: missing value"),
        ({"base": "mine", "quantize": "Q9"}, BadRequest, "unsupported quantization type Q9"),
        ({"base": "mine", "adapters": {"a": "b"}}, BadRequest, "invalid digest format"),
        ({"base": "mine", "adapters": {"../a": "b"}}, BadRequest, "must be relative"),
    ],
)
def test_a_wrong_request_changes_nothing(
    store: ModelStore, changes: dict[str, object], error: type[Exception], reason: str
) -> None:
    old = make.stored_model(store, "mine")
    with pytest.raises(error, match=reason):
        create(store, CreateRequest(ModelName.parse("mine"), **changes))  # type: ignore[arg-type]
    assert store.list() == [old]


def test_a_go_template_is_kept_and_translated(store: ModelStore) -> None:
    make.stored_model(store, "base")
    go = "{{ range .Messages }}{{ .Content }}{{ end }}{{ range .Tools }}{{ . }}{{ end }}"
    manifest = create(store, CreateRequest(ModelName.parse("child"), base="base", template=go))
    assert manifest.go_template == go
    assert manifest.template is not None and "{% for" in manifest.template
    assert manifest.capabilities == ("completion", "tools")


def test_a_file_of_no_known_type_is_refused(store: ModelStore) -> None:
    digest = upload(store, b"hello, I am a text")
    with pytest.raises(BadRequest, match=r"unknown type: notes\.txt"):
        create(store, CreateRequest(ModelName.parse("x"), files={"notes.txt": digest}))


def test_an_upload_that_is_not_what_it_says_leaves_nothing(store: ModelStore) -> None:
    with pytest.raises(DigestMismatch), BlobUpload(store, "sha256:" + "0" * 64) as pieces:
        pieces.write(b"x")
        pieces.finish()
    with BlobUpload(store, "sha256:" + "1" * 64) as pieces:
        pieces.write(b"given up")
    with pytest.raises(BadRequest, match="invalid digest format"):
        BlobUpload(store, "sha256:../../x")
    assert list(store.temp.iterdir()) == []
    assert list(store.blobs.iterdir()) == []
