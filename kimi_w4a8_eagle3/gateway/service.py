"""What one request asks for, from its body to the answer's writer; nothing here sends or receives."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import chat, completions, messages, metrics, requests, responses
from .bodies import characters, parse, require_room
from .collect import Collecting
from .conversation import Conversation
from .endpoints import Endpoint
from .engine import Engine
from .errors import Refusal
from .facts import EngineFacts, usual_sampling
from .generate import Generator, together
from .grammar import check_tools, grammar_of
from .keys import Client
from .limits import bound_logprobs, candidates_of
from .parts import without_pictures
from .pictures import Pads
from .render import ANSWER, Prompt, Renderer
from .responses_writer import ResponsesWriter
from .sealed import Seal
from .trials import Trials
from .writer import Answerer, Writer


@dataclass(slots=True)
class Work:
    """A request that was read. whole: its answer, where no engine is needed. candidates: logprobs a step.

    declared: tools of a response, by the names that the model sees.
    """

    request: Any = None
    whole: dict[str, Any] | None = None
    conversation: Conversation | None = None
    declared: dict[str, responses.Declared] = field(default_factory=dict)
    prompt: Prompt | None = None
    writer: Writer | completions.CompletionWriter | None = None
    streamed: bool = False
    candidates: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of a text completion


class Service:
    """Reads requests and yields answers.

    model: the name that clients use; others are refused where `check_model`. trials: None to trust every grammar.
    """

    def __init__(
        self, engine: Engine, facts: EngineFacts, renderer: Renderer, trials: Trials, seal: Seal, model: str,
        check_model: bool, checkpoint: Path, collecting: Collecting | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._facts, self._renderer, self._trials, self._seal = engine, facts, renderer, trials, seal
        self._model, self._check, self._collecting = model, check_model, collecting
        self._usual, self._pads = usual_sampling(checkpoint), Pads.of(checkpoint)
        self._generator = Generator(engine, renderer.encode(ANSWER, special=True)[0], renderer.token_bytes)
        self._answerer = Answerer(model, renderer.token_bytes)

    def models(self) -> dict[str, Any]:
        """Return the list of the one model."""
        made = {"id": self._model, "object": "model", "created": int(time.time()), "owned_by": "kimi-w4a8-eagle3"}
        return {"object": "list", "data": [{**made, "max_model_len": self._facts.room.total}]}

    def info(self) -> dict[str, Any]:
        """Return what routers and load generators ask about the engine."""
        return self._facts.info

    async def metrics(self) -> bytes:
        """Return the engine's metrics, in Prometheus' text."""
        return await self._engine.read("/metrics")

    def read(self, endpoint: Endpoint, raw: bytes) -> Work:
        """Return what a request asks for; raise Refusal for what it may not. Runs in a thread for large bodies."""
        room = self._facts.room
        body, dropped = parse(raw), list[str]()
        text = characters(body)  # before anything else is computed
        assert endpoint.body is not None
        request = requests.read(endpoint.body, body, endpoint.path, dropped)
        metrics.count_dropped(dropped)
        self._check_model(request)
        if isinstance(request, requests.Completing):
            requests.check_ids(request, self._renderer.vocabulary)
        match request:
            case requests.CompletionRequest():
                require_room(text, max(room.total, completions.MAX_BATCH_TOKENS // 4))
                return self._text(request)
            case requests.TokenizeRequest():
                require_room(text, room.total)
                return Work(whole=self._tokens(request))
            case requests.DetokenizeRequest():
                return Work(whole=self._detokenize(request))
        conversation, declared = self._conversation(request)
        if self._pads is None:
            without_pictures(conversation.messages)
        require_room(text - sum(len(url) for message in conversation.messages for url in message.pictures), room.total)
        check_tools(conversation.tools)
        prompt = self._renderer.render(conversation)
        work = Work(
            request, conversation=conversation, declared=declared, prompt=prompt, streamed=request.stream,
            candidates=candidates_of(conversation),
        )  # fmt: skip
        if not prompt.pictures:  # only a trial knows their size
            self._fit(work, conversation, prompt)
        return work

    def _fit(self, work: Work, conversation: Conversation, prompt: Prompt) -> None:
        """Count the request's tokens, give the answer the room that is left, and make its writer."""
        if isinstance(work.request, requests.CountRequest):
            work.whole = {"input_tokens": prompt.tokens}
            return
        sampling = conversation.sampling
        for name, value in self._usual.items():
            if getattr(sampling, name) is None:
                setattr(sampling, name, value)
        left, asked = self._facts.room.answer(prompt.tokens, sampling.max_tokens), sampling.max_tokens
        sampling.max_tokens = bound_logprobs(work.candidates, asked, left, work.streamed) if work.candidates else left
        conversation.grammar = grammar_of(conversation)
        if conversation.grammar is not None and sampling.min_tokens:
            why = "min_tokens cannot hold where a response format or a tool shapes the answer: send one of them"
            raise Refusal(why, param="min_tokens")
        work.writer = self._writer(work, conversation, prompt)

    def _conversation(self, request: Any) -> tuple[Conversation, dict[str, responses.Declared]]:
        match request:
            case requests.ChatRequest():
                return chat.conversation_of(request), {}
            case requests.ResponsesRequest():
                return responses.conversation_of(request, self._seal)
        return messages.conversation_of(request, self._seal), {}

    def _writer(self, work: Work, conversation: Conversation, prompt: Prompt) -> Writer:
        match work.request:
            case requests.ChatRequest():
                past = sum(len(message.calls) for message in conversation.messages)
                return chat.ChatWriter(self._answerer, work.request, past, prompt.ids)
            case requests.ResponsesRequest():
                return ResponsesWriter(self._answerer, self._seal, work.request, work.declared)
        return messages.MessagesWriter(self._answerer, self._seal, prompt.tokens)

    def _text(self, request: requests.CompletionRequest) -> Work:
        room = self._facts.room
        prompts = completions.prompts_of(request, self._renderer, room.total)
        tokens = completions.tokens_of(request)
        for prompt in prompts:
            room.answer(len(prompt), tokens)
        candidates = 0 if request.logprobs is None else (1 + request.logprobs) * len(prompts) * request.n
        bound_logprobs(candidates, tokens, tokens, request.stream)
        completions.bound_echo(request, prompts)
        writer = completions.CompletionWriter(self._answerer, request, self._renderer, prompts)
        bodies = completions.bodies_of(request, prompts)
        return Work(writer=writer, streamed=request.stream, candidates=candidates, bodies=bodies)

    def _check_model(self, request: requests.Body) -> None:
        asked = request.model
        if not self._check or asked in ("default", self._model) or asked.partition(":")[0] == self._model:
            return
        if asked:
            why = f"The model {asked!r} does not exist; this server serves {self._model!r}"
            raise Refusal(why, 404, "model", "model_not_found")
        if not isinstance(request, requests.TokenizeRequest | requests.DetokenizeRequest):
            raise Refusal(f"you must provide a model parameter, such as {self._model!r}", param="model")

    def _tokens(self, request: requests.TokenizeRequest) -> dict[str, Any]:
        most = {"max_model_len": self._facts.room.total}
        if request.messages is not None:
            fields = request.model_dump(exclude={"prompt", "stream"}, exclude_none=True)
            ids = self._renderer.render(chat.conversation_of(requests.ChatRequest(**fields))).ids
        elif isinstance(request.prompt, str):
            ids = self._renderer.encode(request.prompt, special=True)
        else:
            lists = [self._renderer.encode(one, special=True) for one in request.prompt or ()]
            return {"tokens": lists, "count": [len(one) for one in lists], **most}
        return {"tokens": ids, "count": len(ids), **most}

    def _detokenize(self, request: requests.DetokenizeRequest) -> dict[str, Any]:
        nested = bool(request.tokens) and isinstance(request.tokens[0], list)
        lists = request.tokens if nested else [request.tokens]
        most = self._renderer.vocabulary
        for tokens in lists:
            if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < most for token in tokens):
                raise Refusal("tokens must be ids of the vocabulary", param="tokens")
        texts = [self._renderer.decode(tokens, request.skip_special_tokens) for tokens in lists]
        return {"text": texts if nested else texts[0]}

    async def check(self, work: Work) -> None:
        """Try the request's grammar and pictures in a process of their own; raise Refusal for costly ones."""
        if work.conversation is not None and work.prompt is not None and work.prompt.pictures:
            assert self._pads is not None
            sizes = await self._trials.pictures(work.prompt.pictures)
            work.prompt.tokens += sum(self._pads.tokens(*size) - 1 for size in sizes)
            self._fit(work, work.conversation, work.prompt)
        if work.conversation is not None and work.conversation.grammar is not None:
            work.conversation.grammar = await self._trials.grammar(work.conversation.grammar)
        if work.bodies and (grammar := completions.grammar_of(work.bodies[0])) is not None:
            tried = await self._trials.grammar(grammar)
            for body in work.bodies:
                body["sampling_params"][tried.kind] = tried.text

    async def events(self, work: Work, client: Client) -> AsyncGenerator[bytes, None]:
        """Yield the events of what is new in the request's answers, until all have ended."""
        if isinstance(work.writer, completions.CompletionWriter):
            async with aclosing(together([self._engine.generate(body) for body in work.bodies])) as parts:
                async for index, part in parts:
                    yield work.writer.part(index, part)
            return
        assert work.conversation is not None and work.prompt is not None and work.writer is not None
        collected = self._collecting and self._collecting.choose(work.writer.id, work.conversation, work.prompt, client)
        async with aclosing(self._generator.answers(work.conversation, work.prompt, work.streamed)) as deltas:
            async for delta in deltas:
                if collected:
                    collected.add(delta)
                yield work.writer.delta(delta)
