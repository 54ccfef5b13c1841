"""Requests of EleutherAI's lm-evaluation-harness, answered through a quantized cache. Knows its protocol, not its code.

A context is read block by block through the packed cache (accumulated, as a model that decodes sees its past); then
the continuation is scored, or generated, against that cache. Contexts that several continuations share are read once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from experiments.harness import generation, tasks

SCORED = 16  # tokens of a continuation at a time
ROUND = 128  # caches have room for multiples of this many tokens, so that few programs compile
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<|end|>")  # tokens with which models end, as text
GENERATED = 256  # tokens, where a request does not say; the harness's own default
GREEDY = {"do_sample": (False, None), "temperature": (0, 0.0, None), "top_p": (1, 1.0, None), "num_beams": (1, None)}


class Request(Protocol):
    """The harness's `Instance`: its arguments are (context, continuation), (text,) or (context, options)."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class Answers:
    """One method's answers, and how much of what was read lay quantized in the cache."""

    def __init__(self, given: tasks.Given, label: str, *, batch: int, block: int, prefix: str, limit: int) -> None:
        self.tokenizer, self.limit = given.model.tokenizer, limit
        self.reader, self.batch, self.block = given.reader(label), batch, block
        first = self.tokenizer.encode("", special_tokens=True) or self.tokenizer.encode(prefix, special_tokens=True)
        if not first:
            raise ValueError(f"--prefix={prefix!r} has no tokens; pass a text that a context without any begins with")
        self.first = first
        self.cached = self.quantized = self.cut = 0  # tokens of contexts; contexts that were too long
        self.progress: Callable[[int, int], None] | None = None

    def _report(self, done: int, of: int) -> None:
        if self.progress is not None:
            self.progress(done, of)

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Both as tokens of the whole text. Blanks between them belong to the continuation; it has one token at
        least, and so has the context."""
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if not stripped:
            return list(self.first), self.tokenizer.encode(continuation)
        before = self.tokenizer.encode(stripped)
        whole = self.tokenizer.encode(stripped + continuation)
        return before, whole[len(before) :]

    def _fit(self, context: Sequence[int], after: int) -> tuple[int, ...]:
        """The context's last tokens that leave room for `after` more."""
        room = self.limit - after
        if room < 1:
            raise ValueError(f"--num_tokens={self.limit} leaves no room before a continuation of {after}; pass more")
        self.cut += len(context) > room
        return tuple(context[-room:])

    def _states(self, contexts: Sequence[tuple[int, ...]], after: int) -> Any:
        """(the contexts of a batch, their state), longest first, so that running out of memory comes early."""
        capacity = -(-(max(map(len, contexts)) + after) // ROUND) * ROUND
        ordered = sorted(contexts, key=len, reverse=True)
        parts = tasks.chunks(ordered, min(self.batch, len(ordered)))
        for i, part in enumerate(parts):
            state = self.reader.empty(len(part), capacity)
            state = generation.read(self.reader, state, part, block=self.block)
            real = min(len(part), len(ordered) - i * len(part))  # a last batch is filled up with a row that it has
            self.cached += int(np.asarray(state.length)[:real].sum())
            self.quantized += int(state.quantized_tokens[:real].sum())
            yield part[:real], state
            self._report(i + 1, len(parts))

    def loglikelihood(self, requests: Sequence[Request], **unused: Any) -> list[tuple[float, bool]]:
        """(ln p of the continuation in nats, whether it is what greedy decoding gives) of each request."""
        wanted: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        longest = 0
        for i, request in enumerate(requests):
            context, continuation = self.pair(*request.args)
            if not continuation:
                raise ValueError(f"the continuation {request.args[1]!r} has no tokens of its own after its context")
            wanted.setdefault(self._fit(context, len(continuation)), []).append((i, continuation))
            longest = max(longest, len(continuation))
        found: list[tuple[float, bool]] = [(float("nan"), False)] * len(requests)
        for contexts, state in self._states(list(wanted), longest) if wanted else ():
            for turn in range(max(len(wanted[one]) for one in contexts)):
                asked = [wanted[one][turn] if turn < len(wanted[one]) else (-1, []) for one in contexts]
                rows = [tokens for _, tokens in asked] + [[]] * (len(state.length) - len(asked))
                nats, greedy = generation.score(self.reader, state, rows, block=SCORED)
                for (i, _), one, same in zip(asked, nats, greedy, strict=False):
                    if i >= 0:
                        found[i] = (float(one), bool(same))
        return found

    def _stored(self, tokens: int) -> int:
        """How many keys of a row have left the full-precision window, once as many tokens are cached."""
        scheme = self.reader.scheme
        k, _ = scheme.resolve(self.reader.runs[0].head_dim)
        return k.window.room(tokens - scheme.sink) if scheme.quantizes else 0

    def loglikelihood_rolling(self, requests: Sequence[Request], **unused: Any) -> list[float]:
        """ln p of each whole text in nats, after the prefix; a text beyond --num_tokens in windows that do not
        overlap, each after the last token of the one before."""
        pieces: list[tuple[int, tuple[int, ...], list[int]]] = []
        if self.limit <= len(self.first):
            raise ValueError(f"--num_tokens={self.limit} leaves no room after a prefix of {len(self.first)}; pass more")
        for i, request in enumerate(requests):
            tokens, before = self.tokenizer.encode(request.args[0]), tuple(self.first)
            while tokens:
                room = self.limit - len(before)
                pieces.append((i, before, tokens[:room]))
                before, tokens = (tokens[:room][-1],), tokens[room:]
        total = [0.0] * len(requests)
        pieces.sort(key=lambda piece: len(piece[2]), reverse=True)
        parts = tasks.chunks(pieces, min(self.batch, len(pieces))) if pieces else []
        for done, part in enumerate(parts):
            longest = max(len(before) + len(tokens) for _, before, tokens in part)
            state = self.reader.empty(len(part), -(-longest // ROUND) * ROUND)
            state = generation.read(self.reader, state, [before for _, before, _ in part], block=SCORED)
            rows = [tokens for _, _, tokens in part]
            sums, _ = generation.score(self.reader, state, rows, block=self.block)
            real = min(len(part), len(pieces) - done * len(part))
            for (i, _, tokens), one in zip(part[:real], sums, strict=False):
                total[i] += float(one)
                self.cached += len(tokens)
                self.quantized += self._stored(len(tokens))
            self._report(done + 1, len(parts))
        return total

    def generate_until(self, requests: Sequence[Request], **unused: Any) -> list[str]:
        """Greedy text after each context, up to the first of its stops, or to where the model ends it. Raises
        ValueError for sampling."""
        groups: dict[tuple[tuple[str, ...], int], dict[tuple[int, ...], list[int]]] = {}
        for i, request in enumerate(requests):
            group = groups.setdefault(options(request.args[1]), {})
            context = self.tokenizer.encode(request.args[0]) or self.first
            group.setdefault(self._fit(context, options(request.args[1])[1]), []).append(i)
        found = [""] * len(requests)
        for (stops, most), members in groups.items():

            def stop(tokens: list[int], stops: tuple[str, ...] = stops) -> bool:
                text = self.tokenizer.decode(tokens)
                return any(one in text for one in stops)

            for contexts, state in self._states(list(members), most):
                out = generation.generate(self.reader, state, most=most, stop=stop)
                for context, tokens in zip(contexts, out, strict=False):
                    text = self.tokenizer.decode(tokens)
                    end = min((text.find(one) for one in stops if one in text), default=len(text))
                    for i in members[context]:
                        found[i] = text[:end]
        return found


def options(given: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """(stops, most tokens) of a generation request. Raises ValueError for an option that would not be greedy, or that
    is not known."""
    until = given.get("until") or ()
    stops = ((until,) if isinstance(until, str) else tuple(until)) + ENDS
    most = given.get("max_gen_toks") or given.get("max_new_tokens") or given.get("max_tokens") or GENERATED
    for name, value in given.items():
        if name in ("until", "max_gen_toks", "max_new_tokens", "max_tokens"):
            continue
        if name not in GREEDY or value not in GREEDY[name]:
            allowed = ", ".join(f"{known}={values[0]}" for known, values in GREEDY.items())
            raise ValueError(f"generation option {name}={value!r} is not supported: decoding is greedy ({allowed})")
    return stops, int(most)
