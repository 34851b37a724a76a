"""What is a model's name, and what is none."""

from __future__ import annotations

import pytest

from llmd.registry.errors import NameInvalid
from llmd.registry.names import ModelName


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("smollm2", ("registry.ollama.ai", "library", "smollm2", "latest")),
        ("llama3.2:3b", ("registry.ollama.ai", "library", "llama3.2", "3b")),
        ("me/mine", ("registry.ollama.ai", "me", "mine", "latest")),
        ("localhost:5000/a/b", ("localhost:5000", "a", "b", "latest")),
        ("https://example.org/a/b:c", ("example.org", "a", "b", "c")),
        ("hf.co/TheOrg.x/Repo-1.5:Q4_K_M", ("hf.co", "TheOrg.x", "Repo-1.5", "Q4_K_M")),
        ("huggingface.co/o/r", ("hf.co", "o", "r", "latest")),
    ],
)
def test_a_name_is_read_from_the_right(text: str, parts: tuple[str, ...]) -> None:
    name = ModelName.parse(text)
    assert (name.host, name.namespace, name.model, name.tag) == parts


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "a/", "/m", ":tag", "m:", "a//b", "a/b/c/d", "..", "../etc/passwd", "a/../b"),
        *("-m", "m:../x", "a\\b", "m\0", "m n", " m", "é", "x" * 81, "n.s/m", "con", "a/NUL:x"),
        *("m@sha256:00", "hf.co/o/" + "r" * 97, "host/../m", "m:" + "t" * 81, ".hidden", "m\n"),
        *("a:b:c", "http://", "https:///m"),
    ],
)
def test_what_could_leave_its_folder_or_is_cut_off_is_no_name(text: str) -> None:
    with pytest.raises(NameInvalid, match="invalid model name"):
        ModelName.parse(text)


@pytest.mark.parametrize(
    ("text", "display"),
    [
        ("llama3.2", "llama3.2:latest"),
        ("registry.ollama.ai/library/m:1", "m:1"),
        ("user/m:7b", "user/m:7b"),
        ("hf.co/org/repo:Q8_0", "hf.co/org/repo:Q8_0"),
        ("host:1/library/m", "host:1/library/m:latest"),
    ],
)
def test_the_display_form_leaves_defaults_out_and_parses_back(text: str, display: str) -> None:
    name = ModelName.parse(text)
    assert name.display == display
    assert ModelName.parse(display) == name


def test_names_that_differ_in_case_alone_are_one() -> None:
    assert ModelName.parse("Llama3:Q4") == ModelName.parse("llama3:q4")
    assert len({ModelName.parse("A/b"), ModelName.parse("a/B")}) == 1
    assert ModelName.parse("a") != ModelName.parse("b")


def test_no_two_hosts_share_a_folder() -> None:
    with_port = ModelName.parse("host:5000/a/b").path_parts
    without = ModelName.parse("host_5000/a/b").path_parts
    assert ":" not in with_port[0]
    assert with_port != without
