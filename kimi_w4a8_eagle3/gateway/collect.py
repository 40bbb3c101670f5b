"""Collects the token ids of finished answers where the operator has consented (base/collection.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..base.collection import NO_KEY, PROBE, Collector, key_name, tokenizer_name
from .conversation import Conversation
from .generate import Delta
from .keys import Client
from .render import Prompt, Renderer


@dataclass
class Chosen:
    """A request whose answers are stored as they end."""

    request: str
    collector: Collector
    prompt: list[int]
    structured: bool
    ids: dict[int, list[int]] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Keep the tokens that are new; store an answer that has ended."""
        ids = self.ids.setdefault(delta.index, [])
        ids += delta.ids
        if delta.end is not None:
            self.collector.put(self.request, self.prompt, ids, self.structured)


class Collecting:
    """One collector for each client key. vocabulary: of the model, with `renderer` the name of its tokenizer."""

    def __init__(self, folder: Path, renderer: Renderer, vocabulary: int) -> None:
        self._folder = folder
        self._collectors: dict[str, Collector] = {}
        self._tokenizer = tokenizer_name(renderer.encode(PROBE, special=True), vocabulary)
        self._of(Client())

    def choose(self, request: str, conversation: Conversation, prompt: Prompt, client: Client) -> Chosen | None:
        """Return a request to store, or None. Pictures are no ids, so requests with one are left out.

        request: the id that its answer has, by which it can be erased.
        """
        collector = self._of(client)
        if prompt.pictures or not collector.wants():
            return None
        return Chosen(request, collector, prompt.ids, conversation.grammar is not None)

    def _of(self, client: Client) -> Collector:
        name = key_name(client.key) if client.key else NO_KEY
        if name not in self._collectors:
            made = Collector(self._folder, name)
            made.require_tokenizer(self._tokenizer)
            self._collectors[name] = made
        return self._collectors[name]
