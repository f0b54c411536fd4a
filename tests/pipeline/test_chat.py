"""Chat templates of a GGUF, as a model's own templates use Jinja."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kvstore.pipeline.chat import ChatTemplate, ChatTemplateError
from kvstore.pipeline.gguf_metadata import read_metadata
from kvstore.pipeline.tokenizer import Tokenizer
from tests.tiny_models import write_tiny_gguf

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


def render(source: str, messages: list[dict[str, Any]] = CONVERSATION, **options: Any) -> str:
    return ChatTemplate({"tokenizer.chat_template": source}).render(messages, **options)


def test_smollm2_turns(smollm2: Path) -> None:
    template = ChatTemplate.from_gguf(smollm2)
    assert template.render(CONVERSATION) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "named SmolLM" in template.render([{"role": "user", "content": "Hi"}])


def test_a_longer_conversation_starts_with_the_tokens_of_the_shorter(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    metadata = read_metadata(tmp_path / "m.gguf")
    template, tokenizer = ChatTemplate(metadata), Tokenizer(metadata)
    ids = [
        tokenizer.encode(template.render(CONVERSATION[:n]), special=True, start=True).tolist() for n in (2, 4)
    ]
    assert ids[1][: len(ids[0])] == ids[0]
    assert ids[0][0] == tokenizer.bos_id


def test_the_answer_is_begun_only_if_asked(smollm2: Path) -> None:
    template = ChatTemplate.from_gguf(smollm2)
    assert template.render(CONVERSATION) == (
        template.render(CONVERSATION, add_generation_prompt=False) + "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {% if loop.last %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "Bye\n"),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}!", "Be brief.!"),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "Hi <b>"}'),
        ("{{ {'é': 1} | tojson(indent=1) }}", '{\n "é": 1\n}'),
        ("{{ strftime_now('%d %B %Y') }}", "05 April 2026"),
        ("{{ tools[0].name }}{{ documents is defined }}{{ color }}", "searchFalseblue"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
    ],
)  # fmt: skip
def test_templates_find_what_they_are_written_against(source: str, text: str) -> None:
    found = render(source, tools=[{"name": "search"}], now=datetime(2026, 4, 5), color="blue")
    assert found == text


def test_tokens_are_known_by_name() -> None:
    metadata = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<pad>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 3,
    }
    assert ChatTemplate(metadata).render(CONVERSATION) == "<s>Be brief.</s><pad>"
    assert ChatTemplate(metadata).render(CONVERSATION, bos_token="") == "Be brief.</s><pad>"


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "base.gguf", chat_template=None)
    with pytest.raises(ChatTemplateError, match="tiny-llama-0 has no chat template"):
        ChatTemplate.from_gguf(tmp_path / "base.gguf")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", "cannot be parsed"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
        ("{{ messages + 1 }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ range(10**9) | list }}", "refuses"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_refused(source: str, says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        render(source)
