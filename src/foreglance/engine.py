"""The order of things: `step`, `add`, `cancel`, and how an engine is put together.

The numbers in `step` are the stations of docs/path.md. One thread owns an engine; it has no locks. No tensor
arithmetic, no HTTP and no family names here.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foreglance.cache.prefix import NO_DRAFT, Border, Hit, Kind, PrefixCache
from foreglance.cache.store import CacheStore
from foreglance.chat_format import ChatFormat
from foreglance.drafters.base import Drafter, Settled
from foreglance.drafters.load import DrafterFactory, Surroundings, load_second, make_drafters
from foreglance.grammar import Guide
from foreglance.images import each_picture, image_sources
from foreglance.models.base import Target
from foreglance.models.fingerprint import Origin
from foreglance.models.registry import load_model, prompter_of
from foreglance.models.vision import EmbeddingCache
from foreglance.models.weights import find_model
from foreglance.ops.base import Ops
from foreglance.ops.numerics import SelfTest
from foreglance.prompt import Prompter, Rows
from foreglance.request import (
    DraftReport,
    Event,
    FinishReason,
    Request,
    RequestError,
    Result,
    SamplingParams,
)
from foreglance.runner import Computed, TargetRunner
from foreglance.scheduler import Costs, DepthControl, Scheduler, Work
from foreglance.sequence import Sequence
from foreglance.settings import Settings
from foreglance.slots import Conversation, SlotFile, SlotInfo, SlotKeeper, SlotTable, info_of
from foreglance.stats import Alarm
from foreglance.verify import Verdict, verify

log = logging.getLogger(__name__)
BEST_DRAFTS = ("model", "assistant", "mtp")  # what "auto" takes, the first that there is
# Drafts tried at load: answers of so many tokens, a warning after so many rounds, over in any case after so many
# seconds. From deep to shallow, so that a drafter has no rows to catch up with but the last round's.
TRIAL_PROMPT, TRIAL_TOKENS, TRIAL_ROUNDS, TRIAL_SECONDS = "Hello! Who are you?", 40, 24, 3.0
TRIAL_DEPTHS = (8, 8, 5, 3, 2, 1, 0, 0, 0) * 12
TRIAL_PREFIX_BYTES = 1 << 28  # the prompt is computed once


@dataclass
class Running:
    """What the engine keeps of a sequence beside it: who drafts for it, how deep, and the row counts of its
    checkpoints. `cold`: no row before the last of them was computed as somebody's answer."""

    sequence: Sequence
    drafter: Drafter
    depth: DepthControl
    passed: list[int] = field(default_factory=list)
    cold: bool = True
    explained: bool = False


class Engine:
    """A target, its drafters and their caches. Make one with `Engine.load`.

    `add` requests and `step` until idle; or `generate` for whole results, `stream` for one request as it comes.
    """

    def __init__(
        self,
        target: Target,
        prompter: Prompter,
        settings: Settings | None = None,
        self_test: SelfTest | None = None,
        draft_model: DrafterFactory | None = None,
        origin: Origin | None = None,
    ):
        self.target = target
        self.self_test = self_test  # what the start-up self-test chose; None for an engine put together by hand
        self.settings = settings or Settings()
        self.context = min(self.settings.context or target.spec.context, target.spec.context)
        self._prompter = prompter
        self._draft_model = draft_model
        capacity = self.settings.slots * (self.context + 64)
        self._store = CacheStore(target.spec.caches, capacity)
        self._runner = TargetRunner(target, self._store)
        self._drafters = make_drafters(Surroundings(target, self._store, capacity), draft_model)
        self._scheduler = Scheduler(self.settings.slots, self.settings.grid, target.spec.whole_images)
        self._prefixes = PrefixCache(self.settings.prefix_cache_bytes)
        self._slots = SlotTable(self.settings.slots)
        self._keeper = SlotKeeper(self._slots, self._prefixes, target.spec, self._drafters, origin, self.context)
        self._embeddings = EmbeddingCache(self.settings.image_cache_bytes)
        self._running: dict[int, Running] = {}
        self._costs = Costs()
        # Time that other processes take says nothing of what rows cost; what helping threads take does.
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._alarms = {kind: Alarm() for kind in self._drafters}
        self.warnings: list[str] = []  # what a person should know of drafters that do not work, once each
        self._ids = itertools.count()
        self._ended: list[Event] = []

    @classmethod
    def load(
        cls,
        model: str = "tiny-qwen",
        settings: Settings | None = None,
        instrument: Callable[[Ops], Ops] = lambda ops: ops,
        draft_model: str | None = None,
    ) -> Engine:
        """Load an embedded model by name, a checkpoint folder, or a hub name (downloaded once).

        `instrument` may wrap the operations, e.g. to time them. `draft_model` names a second model, of the same
        vocabulary, that drafts. Raises `foreglance.models.base.ModelError`, which says what is wrong with a checkpoint
        or a pair of them.
        """
        settings = settings or Settings()
        loaded = load_model(model, settings, instrument)
        target = loaded.target
        prompter = prompter_of(loaded, settings)
        second = None if draft_model is None else load_second(draft_model, settings, loaded, instrument)
        draft_folder = None if draft_model is None else find_model(draft_model)
        origin = Origin(loaded.folder, draft_folder, loaded.self_test)
        engine = cls(target, prompter, settings, loaded.self_test, second, origin)
        if settings.try_drafts:
            engine._try_drafts()
        return engine

    def with_target(self, target: Target, settings: Settings | None = None) -> Engine:
        """A fresh engine over another target with the same prompts, e.g. this one's wrapped for measuring, or over the
        same one with other settings (those of loading, such as weights, stay as they were)."""
        return Engine(target, self._prompter, settings or self.settings, self.self_test, self._draft_model)

    def _try_drafts(self) -> None:
        """Draft answers in an engine apart, at each depth in turn, and pass on what that says of the pair and of what
        rows and guesses cost; on a slow machine over when time is up."""
        if self.best_draft == "none":
            return
        trial = Engine(
            self.target,
            self._prompter,
            replace(self.settings, slots=1, prefix_cache_bytes=TRIAL_PREFIX_BYTES),
            draft_model=self._draft_model,
        )
        try:
            trouble = trial._tour(self.best_draft)
        except RequestError as error:
            log.info("no text to try drafts on: %s", error)
            return
        if trouble is not None:
            self._warn(f"drafter {self.best_draft}: a short text at load did not go well: {trouble}")
        self.warnings += trial.warnings
        self._costs = trial._costs.toured()

    def _tour(self, kind: str) -> str | None:
        """Answers at the depths of the trial; -> what went wrong. The first rounds alone give reason for a warning."""
        alarm, began, tour = Alarm(TRIAL_ROUNDS), time.perf_counter(), self._costs.tour
        self._alarms[kind] = alarm
        tour.extend(TRIAL_DEPTHS)
        for seed in range(len(TRIAL_DEPTHS)):
            sampling = SamplingParams(max_tokens=TRIAL_TOKENS, temperature=1.0, seed=seed)
            for event in self.stream(Request.from_prompt(TRIAL_PROMPT, sampling=sampling)):
                if event.result is not None and (trouble := event.result.error or event.result.draft.off_because):
                    return trouble
                if alarm.is_content:
                    self._alarms[kind] = Alarm(len(TRIAL_DEPTHS))
                if not tour or time.perf_counter() - began > TRIAL_SECONDS:
                    return None
        return None

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        log.warning(message)

    def add(self, request: Request) -> str:
        """Queue a request. Raises `RequestError` before any work if it cannot be served."""
        return self.add_rows(request, self.prepare(request))

    def prepare(self, request: Request) -> Rows:
        """The request's prompt as rows. Raises `RequestError` if its pictures are broken, too many or too large.
        Changes nothing, so that any one thread may call it while another one steps."""
        if request.prompt is not None:
            return self._prompter.raw_rows(self._known_tokens(request.prompt))
        if self.target.spec.image_token < 0 and image_sources(request.messages):
            raise RequestError(f"{self.target.spec.name} takes no images", param="image", code="images_unsupported")
        pictures = each_picture(request.messages, self.settings.max_images, self.settings.max_pixels)
        rows = self._prompter.rows_of(request, pictures)
        self._guide(request, rows)  # so that what cannot be compiled is refused here, and is at hand later
        return rows

    def _guide(self, request: Request, rows: Rows) -> Guide | None:
        spec = self.target.spec
        return self._prompter.guide(request, rows.reasoning, spec.vocab_size, spec.eos)

    def _known_tokens(self, prompt: str | Many[int]) -> str | Many[int]:
        size = self.target.spec.vocab_size
        bad = [] if isinstance(prompt, str) else [token for token in prompt if token >= size]
        if bad:
            raise RequestError(f"prompt: names token {bad[0]}, the vocabulary has {size}", param="prompt")
        return prompt

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of text, with the special tokens that the tokenizer puts around any."""
        return self._prompter.encode(text, special)

    @property
    def format(self) -> ChatFormat:
        """How the model writes reasoning and tool calls."""
        return self._prompter.format

    def decode(self, token_ids: Many[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._prompter.decode(token_ids)

    def piece(self, token_id: int) -> str:
        """The text of one token by itself, special tokens too."""
        return self._prompter.piece(token_id)

    def add_rows(self, request: Request, rows: Rows) -> str:
        """Queue a request whose prompt is already rows."""
        if not len(rows):
            raise RequestError("the prompt is empty", param="prompt")
        if len(rows) >= self.context:
            raise RequestError(
                f"the prompt has {len(rows)} rows ({rows.num_image_rows} of them image rows), the context holds "
                f"{self.context} and at least one must be left for the answer",
                param="messages",
                code="context_length_exceeded",
            )
        bad = [token for token in request.sampling.logit_bias if token >= self.target.spec.vocab_size]
        if bad:
            raise RequestError(
                f"logit_bias names token {bad[0]}, the vocabulary has {self.target.spec.vocab_size}",
                param="logit_bias",
            )
        if self._scheduler.find(request.id) is not None:
            raise RequestError(f"a request of id {request.id} is in the engine", param="id", code="duplicate_id")
        drafter, report = self._drafter_for(request)
        spec = self.target.spec
        decode = self._prompter.decode_markup if request.sampling.markup else self._prompter.decode
        guide = self._guide(request, rows)
        sequence = Sequence(next(self._ids), request, rows, spec.rule, spec.eos, decode, self.context, guide)
        sequence.report = report
        control = DepthControl(request.speculation.depth, drafter.kind, drafter.max_depth, self._costs)
        self._running[sequence.id] = Running(sequence, drafter, control)
        self._scheduler.add(sequence)
        return request.id

    @property
    def best_draft(self) -> str:
        """The kind of drafter that "auto" takes; "none" if there is none."""
        return next((kind for kind in BEST_DRAFTS if kind in self._drafters), "none")

    def use_drafter(self, drafter: Drafter) -> None:
        """Put a drafter in, in place of the one of its kind; only while nothing runs."""
        if not self.is_idle:
            raise RuntimeError("a drafter can be exchanged only while no request runs or waits")
        self._drafters[drafter.kind] = drafter
        self._alarms[drafter.kind] = Alarm()

    def _drafter_for(self, request: Request) -> tuple[Drafter, DraftReport]:
        """Who drafts, and the report of it. A drafter that was asked for by name and is missing is refused."""
        wanted, depth, images = (
            request.speculation.draft,
            request.speculation.depth,
            request.speculation.images,
        )
        off = None
        if wanted == "none" or depth == 0:
            wanted, off = "none", "drafts were switched off" if wanted == "none" else "depth 0 was asked for"
        elif wanted == "auto":
            wanted = self.best_draft
            off = None if wanted != "none" else f"the checkpoint of {self.target.spec.name} has no draft head"
        elif wanted not in self._drafters:
            lacking = (
                "the engine was given no second model"
                if wanted in ("model", "assistant")
                else f"the checkpoint of {self.target.spec.name} has no such head"
            )
            raise RequestError(
                f"draft {wanted!r} was asked for, but {lacking}; use {self._drafts_there()}",
                param="draft",
                code="draft_unavailable",
            )
        return self._drafters[wanted], DraftReport(wanted, depth if off is None else 0, images, off)

    def _drafts_there(self) -> str:
        *others, last = (f'"{kind}"' for kind in ("auto", *self._drafters))
        return f"{', '.join(others)} or {last}"

    def cancel(self, request_id: str) -> bool:
        """End a request between two steps and give everything back; False if it is not known or has ended."""
        sequence = self._scheduler.find(request_id)
        if sequence is None:
            return False
        self._end(sequence, "cancelled")
        return True

    @property
    def draft_kinds(self) -> tuple[str, ...]:
        """The kinds of drafters that a request may name here."""
        return tuple(self._drafters)

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle and not self._ended

    def check(self) -> None:
        """Integrity of all stores; when idle they hold nothing."""
        for store in (self._store, *(s for drafter in self._drafters.values() for s in drafter.stores)):
            store.check()
            if self._scheduler.is_idle and len(store):
                raise AssertionError(f"idle, but {len(store)} sequences still hold rows")

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One step over everything that runs; -> what it gained, and final events of requests that ended since."""
        self._admit()
        works = self._scheduler.pick()  # 1  who runs
        try:
            if works:
                self._step(works)
        except Exception as error:  # it ends the requests that were in the step, each with its one final event
            log.exception("a step over %d sequences failed", len(works))
            for work in works:
                if work.sequence.id in self._running:
                    self._end(work.sequence, "error", f"{type(error).__name__}: {error}")
        ended, self._ended = self._ended, []
        return ended

    def _step(self, works: list[Work]) -> None:
        began = self._clock()
        computed = self._runner.run(works, self._refuse)  # 4-6  their rows through the target; picks
        verdicts = self._verify(computed)  # 7
        self._commit(computed, verdicts)  # 8  the only place where lengths move
        self._take(computed, verdicts)  # 9  text, stop strings, the end
        drafting = self._draft(computed, verdicts)  # 10  guesses for the next step
        self._time(computed, began, drafting)

    def _admit(self) -> None:
        """Give free slots to sequences that wait, and begin those whose rows come next. One that must wait for another
        one's prompt begins when that is computed, since it may share rows with it."""
        for sequence in self._scheduler.admit():
            self._slots.take(sequence.id, sequence.rows.identities())
        must_wait = False
        for sequence in self._scheduler.running:
            if sequence.id not in self._store and not (must_wait and self._scheduler.has_chunks(sequence)):
                self._begin(self._running[sequence.id])
            must_wait = must_wait or (sequence.finish is None and self._scheduler.has_chunks(sequence))

    def _begin(self, running: Running) -> None:
        """Open a sequence's caches, with what earlier requests left."""
        sequence = running.sequence
        sequence.counters.begun = time.perf_counter()
        try:
            hit = self._prefixes.find(sequence.rows.identities(), running.drafter.key(sequence))
            self._open(running, hit)
            self._embed(sequence, hit)
        except Exception as error:  # one request fails, the others go on
            self._end(sequence, "error", f"{type(error).__name__}: {error}")

    def _open(self, running: Running, hit: Hit | None) -> None:
        sequence = running.sequence
        if hit is None:
            self._store.open(sequence.id)
        else:
            self._store.adopt(sequence.id, hit.target)
            running.passed, running.cold = list(hit.borders), hit.cold
            sequence.advance(hit.rows)
            sequence.counters.cached_rows = hit.rows
        running.drafter.admit(sequence, hit)

    def _embed(self, sequence: Sequence, hit: Hit | None) -> None:
        """Image embeddings of the rows that are still to be computed, by the target or by a draft that lags behind."""
        first = sequence.prefilled
        if hit is not None and hit.inputs_from is not None:
            first = min(first, hit.inputs_from)
        for index in sorted(set(sequence.rows.image[first:].tolist()) - {-1}):
            image = sequence.rows.images[index]
            embeddings = self._embeddings.get(image.digest)
            if embeddings is None:
                embeddings = self.target.embed_image(image)
                self._embeddings.put(image.digest, embeddings)
            sequence.embeds[index] = embeddings

    def _verify(self, computed: Computed) -> list[Verdict]:
        """A prompt chunk is kept whole; few rows as far as their drafts stand and the sequence goes on."""
        verdicts = []
        for work, picks in zip(computed.works, computed.picks, strict=True):
            if work.chunk:
                verdicts.append(Verdict(work.num_rows, tuple(picks.tokens), logprobs=tuple(picks.logprobs)))
            else:
                verdict = verify(work.sequence.draft, picks.tokens, picks.logprobs)
                verdicts.append(work.sequence.limit(verdict))
        return verdicts

    def _commit(self, computed: Computed, verdicts: Many[Verdict]) -> None:
        for work, verdict in zip(computed.works, verdicts, strict=True):
            sequence, keep = work.sequence, verdict.keep
            self._store.commit(sequence.id, keep, sequence.position(work.start + keep - 1))
            if sequence.in_prefill:
                sequence.advance(keep)

    def _take(self, computed: Computed, verdicts: Many[Verdict]) -> None:
        for work, verdict in zip(computed.works, verdicts, strict=True):
            running = self._running[work.sequence.id]
            if not work.chunk:
                self._learn(running, verdict)
            if verdict.tokens:
                self._explain(running)
                self._ended.append(work.sequence.take(verdict))

    def _learn(self, running: Running, verdict: Verdict) -> None:
        if not verdict.drafted:
            return
        running.depth.learn(verdict.drafted, verdict.accepted)
        alarm = self._alarms[running.drafter.kind]
        alarm.add(verdict.drafted, verdict.accepted)
        if (message := alarm.message(running.drafter.kind)) is not None:
            self._warn(message)

    def _draft(self, computed: Computed, verdicts: Many[Verdict]) -> float:
        """Each drafter gets its sequences in one call; -> seconds that those took who guessed. A sequence that ended is
        not drafted for, but its states are handed over, since its rows may serve another request."""
        by_drafter: dict[Drafter, list[Settled]] = {}
        for work, verdict, first in zip(computed.works, verdicts, computed.firsts, strict=True):
            running, states = self._running[work.sequence.id], None
            drafter = running.drafter
            if drafter.kind == "none":
                continue
            if drafter.wants_hidden:
                states = computed.hidden
                assert states is not None
                if verdict.keep != states.shape[0]:
                    states = states[first : first + verdict.keep]
            by_drafter.setdefault(drafter, []).append(self._settled(running, work.start, states))
        seconds = 0.0
        for drafter, settled in by_drafter.items():
            seconds += self._propose(drafter, settled, computed, verdicts)
        for work in computed.works:
            self._settle(work)
        return seconds

    def _time(self, computed: Computed, began: float, drafting: float) -> None:
        """Learn what a step cost in which nothing began or ended, as long as somebody goes by it."""
        works = computed.works
        if not any(running.depth.asks_for_costs for running in self._running.values()):
            return
        if works and all(work.decodes and work.sequence.finish is None for work in works):
            self._costs.add_step(sum(work.num_rows for work in works), self._clock() - began - drafting)

    def _settled(self, running: Running, start: int, states: Tensor | None) -> Settled:
        sequence, depth = running.sequence, 0
        if sequence.finish is None and not sequence.in_prefill:
            depth = running.depth.next(self._scheduler.num_running, sequence.wanted)
        return Settled(sequence, start, states, depth)

    def _propose(self, drafter: Drafter, settled: Many[Settled], computed: Computed, verdicts: Many[Verdict]) -> float:
        """-> seconds, 0 if there are no guesses. A drafter that fails costs its sequences their drafts, never their
        text."""
        guessing = any([one.depth for one in settled])
        began = self._clock() if guessing else 0.0
        try:
            drafts = drafter.propose(settled)
        except Exception as error:
            log.exception("drafter %s failed and is switched off for %d sequences", drafter.kind, len(settled))
            for one in settled:
                self._switch_off(
                    self._running[one.sequence.id], f"the drafter failed ({type(error).__name__}: {error})"
                )
            return 0.0
        if not drafts:
            return 0.0
        seconds, guessed = self._clock() - began, [one for one in settled if drafts.get(one.sequence.id)]
        for one in settled:
            one.sequence.draft = drafts.get(one.sequence.id, ())
        if guessed and not any(one.sequence.in_prefill for one in settled):
            deepest = max(len(one.sequence.draft) for one in guessed)
            drafted = {work.sequence.id: v.drafted for work, v in zip(computed.works, verdicts, strict=True)}
            is_steady = all(drafted[one.sequence.id] >= len(one.sequence.draft) for one in guessed)
            self._costs.add_draft(drafter.kind, len(guessed), deepest, seconds, is_steady)
        return seconds if guessed else 0.0

    def _switch_off(self, running: Running, reason: str) -> None:
        running.drafter.retire(running.sequence)
        running.drafter = self._drafters["none"]
        running.sequence.draft = ()
        running.sequence.report = replace(running.sequence.report, kind="none", off_because=reason)

    def _settle(self, work: Work) -> None:
        """After a step: leave what others may begin with, retire what ended, let go of image embeddings."""
        running = self._running[work.sequence.id]
        if work.sequence.finish is not None:
            running.cold = False
            self._leave(running, "turn")
            self._forget(running)
        elif not work.chunk:
            work.sequence.embeds.clear()
        elif work.sequence.in_prefill:
            self._leave(running, "chunk" if work.at_border else "prompt")

    def _leave(self, running: Running, kind: Kind) -> None:
        """Keep the rows that a sequence has computed, for itself in its next turn and for others. A failure costs what
        is kept, and no text."""
        if not self.settings.prefix_cache_bytes:
            return
        sequence, cache = running.sequence, self._store[running.sequence.id]
        try:
            memory, border = running.drafter.remember(sequence), Border(kind, running.cold)
            self._prefixes.put(sequence.identities(cache.rows), cache, memory, border, running.passed)
        except Exception:
            log.exception("rows cannot be kept for other requests; what was kept is given up")
            self._prefixes.clear()
        running.passed.append(cache.rows)

    def _explain(self, running: Running) -> None:
        """Say so while automatic depth stands at no drafts, or if the drafter has no more; anew only when that changes,
        since this is asked in every step."""
        sequence, resting = running.sequence, running.depth.is_off
        if running.drafter.kind == "none" or (running.explained == resting and sequence.undrafted is None):
            return
        running.explained = resting
        chance = running.depth.acceptance.at(1)
        reason = f"drafting did not pay on this text (acceptance about {chance:.0%} at depth 1)"
        sequence.report = replace(sequence.report, off_because=sequence.undrafted or (reason if resting else None))

    def _refuse(self, sequence: Sequence, error: str) -> None:
        self._end(sequence, "error", error)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence from outside: nothing of it stays but whole prompt chunks that were left for others."""
        if sequence.finish is None:  # else its one final event is out already
            self._ended.append(sequence.end(reason, error))
        self._forget(self._running[sequence.id])

    def _forget(self, running: Running) -> None:
        if self._slots.slot_of(running.sequence.id) is not None:
            self._slots.give_back(running.sequence.id, self._conversation(running))
        if running.sequence.id in self._store:
            self._store.release(running.sequence.id)
        running.drafter.retire(running.sequence)
        self._scheduler.remove([running.sequence])
        del self._running[running.sequence.id]

    def _conversation(self, running: Running) -> Conversation:
        """What a sequence that ends leaves in its slot."""
        sequence, key = running.sequence, running.drafter.key(running.sequence) or NO_DRAFT
        return Conversation(sequence.identities(sequence.committed), key, self._running_info(running))

    def _running_info(self, running: Running) -> SlotInfo:
        sequence, slot = running.sequence, self._slots.slot_of(running.sequence.id)
        assert slot is not None
        caches = running.drafter.remember(sequence).caches if sequence.id in self._store else ()
        return info_of(slot, sequence, caches[0].rows if caches else 0)

    def forget(self) -> None:
        """Let go of all rows and image embeddings that are kept for later requests."""
        self._prefixes.clear()
        self._embeddings.clear()

    @property
    def cached_bytes(self) -> int:
        """Memory that rows kept for later requests take."""
        return self._prefixes.bytes_held

    def slots(self, with_text: bool = False) -> list[SlotInfo]:
        """What each slot holds: the sequence that runs in it, else the conversation last finished there."""
        infos = []
        for slot in range(len(self._slots)):
            name, last = self._slots.sequence_in(slot), self._slots.conversation_in(slot)
            running = None if name is None else self._running[name]
            info = self._keeper.info(slot) if running is None else self._running_info(running)
            if running is not None:
                rows = running.sequence.identities(running.sequence.known)
            else:
                rows = np.empty(0, np.int64) if last is None else last.identities
            infos.append(replace(info, text=self.decode(rows[rows >= 0].tolist())) if with_text else info)
        return infos

    def save_slot(self, slot: int, path: Path) -> SlotFile:
        """Write the conversation that lies in a slot to a file, its draft included. Raises `RequestError`."""
        return self._keeper.save(slot, path)

    def restore_slot(self, slot: int, path: Path) -> SlotFile:
        """Put a saved conversation where the next request that begins with it finds it. Raises `RequestError`, before
        anything changes, if the file does not fit this engine."""
        return self._keeper.restore(slot, path)

    def erase_slot(self, slot: int) -> int:
        """Forget the conversation that lies in a slot, but for rows that others share; -> rows forgotten."""
        return self._keeper.erase(slot)

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one request and give its events as they come; the last one carries the result.

        Leaving the iterator early cancels the request. Other requests that are in the engine run along.
        """
        name = self.add(request)
        try:
            while True:
                for event in self._step_for([name]):
                    yield event
                    if event.result is not None:
                        return
        finally:
            self.cancel(name)

    def generate(self, requests: Request | Iterable[Request]) -> list[Result]:
        """Run requests together and give their results in order. Refuses all if one cannot be served."""
        many = [requests] if isinstance(requests, Request) else list(requests)
        names = self._add_all([(request, self.prepare(request)) for request in many])
        results: dict[str, Result] = {}
        while len(results) < len(names):
            results |= {e.request_id: e.result for e in self._step_for(names) if e.result is not None}
        return [results[name] for name in names]

    def _step_for(self, names: Many[str]) -> list[Event]:
        """One step, and the events of these requests; those of others wait for whoever steps next."""
        events = self.step()
        self._ended += [event for event in events if event.request_id not in names]
        return [event for event in events if event.request_id in names]

    def _add_all(self, prepared: Many[tuple[Request, Rows]]) -> list[str]:
        """Queue all or none."""
        names: list[str] = []
        try:
            for request, rows in prepared:
                names.append(self.add_rows(request, rows))
        except RequestError:
            for name in names:
                self.cancel(name)
            self._ended = [event for event in self._ended if event.request_id not in names]
            raise
        return names
