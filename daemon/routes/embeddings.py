"""Texts to vectors: /api/embed, its older form /api/embeddings, and /v1/embeddings.

All texts of a request go to the worker in one message. Vectors are of length one and in the order
of the texts. A vector with a value that is no number is an error that names the text's index.
"""

from __future__ import annotations

import array
import base64
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from ...backend.protocol import Embed, Embedded
from ..errors import BadRequest, DaemonError, NotFound, RequestFailed
from .bodies import EmbedBody, EmbeddingsBody
from .call import Call, Route
from .durations import nanoseconds, parse_keep_alive_s
from .generation import Held, holding, new_id
from .lookup import Model, find_model
from .native import parse_options
from .openai_bodies import OpenAIEmbeddingsBody
from .options import Options
from .replies import Family

ENCODINGS = ("float", "base64")


async def embed(call: Call) -> None:
    """POST /api/embed."""
    body = call.decode(EmbedBody)
    keep_alive_s = parse_keep_alive_s(body.keep_alive)
    texts = _texts(body.input)
    model = _find(call, body.model)
    options = parse_options(call, model, body.options)
    async with holding(call, model, keep_alive_s) as held:
        if not texts:  # only loads the model
            await call.send_json({"model": model.asked, "embeddings": []})
            return
        found = await _embedded(
            held, texts, options, truncate=body.truncate is not False, dimensions=body.dimensions
        )
        await call.send_json(
            {
                "model": model.asked,
                "embeddings": found.vectors,
                "total_duration": nanoseconds(time.monotonic() - call.arrived),
                "load_duration": nanoseconds(held.load_s),
                "prompt_eval_count": found.num_prompt_tokens,
            }
        )


async def embeddings(call: Call) -> None:
    """POST /api/embeddings."""
    body = call.decode(EmbeddingsBody)
    keep_alive_s = parse_keep_alive_s(body.keep_alive)
    model = _find(call, body.model)
    options = parse_options(call, model, body.options)
    async with holding(call, model, keep_alive_s) as held:
        if not body.prompt:
            await call.send_json({"embedding": []})
            return
        found = await _embedded(held, [body.prompt], options)
        await call.send_json({"embedding": found.vectors[0]})


async def openai_embeddings(call: Call) -> None:
    """POST /v1/embeddings."""
    body = call.decode(OpenAIEmbeddingsBody)
    encoding = (body.encoding_format or "float").lower()
    if encoding not in ENCODINGS:
        raise BadRequest(
            f"Invalid value for 'encoding_format' = {body.encoding_format}. "
            "Supported values: ['float', 'base64']."
        )
    texts = _openai_texts(body.input)
    keep_alive_s = parse_keep_alive_s(body.keep_alive)
    model = find_model(call.services, body.model, empty="model is required")
    options = parse_options(call, model, body.options)
    async with holding(call, model, keep_alive_s) as held:
        found = await _embedded(held, texts, options, dimensions=body.dimensions)
    encode = _base64 if encoding == "base64" else list
    data = [
        {"object": "embedding", "embedding": encode(vector), "index": index}
        for index, vector in enumerate(found.vectors)
    ]
    count = found.num_prompt_tokens
    await call.send_json(
        {
            "object": "list",
            "data": data,
            "model": model.asked,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


async def _embedded(
    held: Held,
    texts: list[str],
    options: Options,
    truncate: bool = True,
    dimensions: int | None = None,
) -> Embedded:
    """Raises BadRequest for what the worker refuses."""
    request = Embed(
        id=new_id(),
        texts=texts,
        truncate=truncate,
        dimensions=max(0, dimensions or 0),
        num_ctx=options.num_ctx,
    )
    try:
        found = await held.lease.embed(request)
    except RequestFailed as error:
        if error.code == "too_long":
            raise BadRequest("the input length exceeds the context length") from error
        raise BadRequest(str(error)) from error
    if len(found.vectors) != len(texts):
        raise DaemonError(f"{len(texts)} texts went in, {len(found.vectors)} vectors came out")
    for index, vector in enumerate(found.vectors):
        if not all(map(math.isfinite, vector)):
            raise BadRequest(f"embedding contains NaN or Inf values (input {index})")
    return found


def _find(call: Call, asked: str | None) -> Model:
    try:
        return find_model(call.services, asked, empty="model is required")
    except NotFound as error:
        quoted = json.dumps(asked, ensure_ascii=False)
        raise NotFound(f"model {quoted} not found, try pulling it first") from error


def _texts(value: Any) -> list[str]:
    """None, "" and [] are no texts. Raises BadRequest."""
    if value is None or value == "":
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRequest("invalid input type")
    return texts


def _openai_texts(value: Any) -> list[str]:
    """An empty text is a text here. Raises BadRequest."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise BadRequest("invalid input")
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest("invalid input: texts are expected, not token ids")
    return texts


def _base64(vector: Sequence[float]) -> str:
    """Little-endian float32."""
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


ROUTES = (
    Route(("POST",), "/api/embed", embed, Family.NATIVE, EmbedBody, "Embed texts"),
    Route(
        ("POST",), "/api/embeddings", embeddings, Family.NATIVE, EmbeddingsBody, "Embed one text"
    ),
    Route(
        ("POST",),
        "/v1/embeddings",
        openai_embeddings,
        Family.OPENAI,
        OpenAIEmbeddingsBody,
        "Embed texts",
    ),
)
