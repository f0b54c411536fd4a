"""The thread that reads from flash what may be needed next, while nobody else reads: `prefetch.prefetcher` at work.

It begins with the first hint, and stands back for every request: a look-up or a load under way stops it within one
frame, the unit of a flash read, and it goes on once nothing was read for a moment. A block that it was reading is given
up then. What nobody asked for by name also stands back when the device is short of memory or charge, or hot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.prefetch.candidates import Read, Sign
from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.prefetcher import Prefetcher, Usefulness
from kvstore.prefetch.pressure import Pressure

from .block import Block, Residence, own_blocks
from .flash.record import BadRecordError, RecordReader
from .match import Match
from .namespace import Namespace
from .presence import Presence, State, Stretch
from .tiers.tiers import Tiers

log = logging.getLogger(__name__)

_SHARE = 4  # this part of warm memory is the most that is fetched ahead and not used yet
_QUIET = 0.02  # seconds after the last sign of a request until reading ahead goes on
_POLLS = 0.5  # seconds: look-ups that follow one another for so long and lease nothing only ask what has come
_AGAIN = 2.0  # seconds until pressure is looked at again
_NEIGHBOURS = 24  # blocks asked of the semantic index
_PASSAGES = 10  # texts of them that count
_WORDS = 9  # of a query: more say no more about how sure its neighbours are
_SESSIONS = 256  # that are remembered
_UNSEEN = 64  # hints and requests that were not looked at yet, at most


class _Hint(NamedTuple):
    space: Namespace
    tokens: NDArray[np.int32] | None
    text: str | None
    session: Hashable


class Prefetching:
    """One daemon thread over `tiers`, from the first `hint` or `demand` to `close`. Any thread may call."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._costs = DEVICES[tiers.profile.device]
        self._prefetcher = Prefetcher(tiers.warm.total // _SHARE, self._read_of, self._in_memory)
        self.stands_back: Callable[[], str | None] = Pressure().reason
        """Why nothing is to be fetched ahead just now, or None."""
        self._changed = threading.Condition(tiers.lock)
        self._hints: OrderedDict[Hashable, _Hint] = OrderedDict()  # not looked at yet
        self._sessions: OrderedDict[Hashable, list[int]] = OrderedDict()  # blocks of their prompts
        self._requests: deque[list[int]] = deque(maxlen=_UNSEEN)  # blocks of each, not learned from yet
        self._request_at = float("-inf")
        self._leased_at = float("-inf")  # or when look-ups began that follow one another
        self._thread: threading.Thread | None = None
        self._closing = False
        self._news = False  # something to look at, or to read
        self._under_way = False  # a hint or a block

    # -- by requests ------------------------------------------------------------------------------------------------

    def request(self) -> None:
        """A request is being served, or somebody asks what is held."""
        now = time.monotonic()
        if now - self._request_at > _QUIET:
            self._leased_at = now
        self._request_at = now

    def used(self, blocks: Sequence[Block]) -> None:
        """A request leased these blocks. Called under the lock; learned from when there is time for it."""
        self._request_at = self._leased_at = time.monotonic()
        if self._thread is not None and blocks:
            self._requests.append([block.number for block in blocks])
            if not self._news:  # it sleeps, and not only until this request is over
                self._wake()

    # -- by engines -------------------------------------------------------------------------------------------------

    def hint(
        self, space: Namespace, tokens: NDArray[np.int32] | None, text: str | None, session: Hashable
    ) -> None:
        """See `KVStore.hint`. Called under the lock; looked at by the thread, and only the last one of a session."""
        if self._tiers.cold is None:
            return
        self._hints[space.digest, session] = _Hint(space, tokens, text, session)
        if len(self._hints) > _UNSEEN:
            self._hints.popitem(last=False)
        self._start()

    def demand(self, match: Match, timeout: float | None) -> None:
        """Read what was found, as soon as no request reads; wait at most `timeout` seconds (None: no limit) for that.

        Called under the lock, which is given up while it waits.
        """
        numbers = [block.number for block in match.blocks]
        numbers += [piece.block.number for run in match.runs for piece in run.pieces]
        self._request_at = float("-inf")  # the look-up that found it was no request yet
        self._prefetcher.demand(numbers)
        self._start()
        self._changed.wait_for(
            lambda: self._closing or not any(self._prefetcher.is_coming(number) for number in numbers),
            timeout,
        )

    def presence(self, match: Match) -> Presence:
        """Called under the lock."""
        placed = [
            (block.start, min(block.start + block.length, match.length), block.number)
            for block in match.blocks
        ]
        placed += [
            (piece.target, piece.target + piece.length, piece.block.number)
            for run in match.runs
            for piece in run.pieces
        ]
        found: list[Stretch] = []
        for start, stop, number in sorted(placed):
            state = self._state(number)
            if state is None or start >= stop:
                continue
            if found and (found[-1].stop, found[-1].state) == (start, state):
                found[-1] = found[-1]._replace(stop=stop)
            else:
                found.append(Stretch(start, stop, state))
        return Presence(tuple(found))

    def usefulness(self) -> Usefulness:
        """Called under the lock."""
        self._learn()
        return self._prefetcher.usefulness()

    def settled(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, until nothing is left that is worth reading; whether that came."""
        with self._tiers.lock:
            return self._changed.wait_for(
                lambda: self._closing or not (self._news or self._under_way), timeout
            )

    def close(self) -> None:
        """Stop reading, and the thread."""
        with self._tiers.lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None and self._tiers.cold is not None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="kvstore-prefetch", daemon=True)
            self._thread.start()
        self._wake()

    def _wake(self) -> None:
        self._news = True
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            reason = self._reason()
            with self._tiers.lock:
                if self._closing:
                    return
                if not self._news:
                    self._changed.wait()
                    continue
                if wait := self._until_quiet():
                    self._changed.wait(wait)
                    continue
                self._learn()
                step = self._prefetcher.next()
                if step is None and not self._hints:
                    self._news = False
                    self._changed.notify_all()
                    continue
                demanded = step is not None and step.demanded
                if reason is not None and not demanded:
                    self._tiers.counts[f"prefetch_stood_back: {reason}"] += 1
                    self._changed.wait(_AGAIN)
                    continue
                hint = self._hints.popitem(last=False) if self._hints and not demanded else None
                self._under_way = True
            try:
                if hint is not None:
                    self._look_at(*hint)
                else:
                    self._bring_next()
            except Exception:  # the thread must live, and not fill the log
                log.warning("could not fetch ahead", exc_info=True)
                with self._tiers.lock:
                    self._changed.wait(_AGAIN)
            with self._tiers.lock:
                self._under_way = False
                self._changed.notify_all()

    def _learn(self) -> None:
        """From the requests that came since."""
        while self._requests:
            self._prefetcher.used(self._requests.popleft())

    def _reason(self) -> str | None:
        """Not under the lock: sensors are slow, and a host may ask anyone."""
        try:
            return self.stands_back()
        except Exception:
            log.warning("nobody can tell whether to stand back", exc_info=True)
            return "nobody can tell"

    def _until_quiet(self) -> float:
        """Seconds to wait at least until no request is served, so far as is known now."""
        quiet = self._tiers.flash.resting()
        if self._request_at - self._leased_at < _POLLS:
            quiet = min(quiet, time.monotonic() - self._request_at)
        return max(0.0, _QUIET - quiet)

    def _bring_next(self) -> None:
        """Read the block that is worth it the most, unless a request comes meanwhile."""
        tiers, prefetcher = self._tiers, self._prefetcher
        with tiers.lock:
            step = prefetcher.next()
            if step is None:
                return
            block = tiers.blocks[step.block]
            for number in step.drop:
                tiers.forget_memory(tiers.blocks[number])
            if step.demanded:
                room = tiers.allocate_warm(block.nbytes, block.namespace)
            else:
                room = tiers.allocate_ahead(block, prefetcher.spared)
            if room is None:
                tiers.counts["prefetch_no_room"] += 1
                prefetcher.give_up(step.block)
                return
            tiers.acquire([block], used=False)
            prefetcher.begin(step)
        reader: RecordReader | None = None
        whole: bool | None = None
        try:
            reader = tiers.open_record(block, ahead=True)
            whole = self._read(reader, block, room)
        except BadRecordError as error:
            with tiers.lock:
                tiers.quarantine(block, error)
        finally:
            nbytes = 0 if reader is None else reader.bytes_read
            if reader is not None:
                reader.close()
            with tiers.lock:
                tiers.counts["bytes_read"] += nbytes
                if whole and block.memory is None and not block.doomed:
                    tiers.settle(block, room)
                    prefetcher.arrived(nbytes)
                else:
                    tiers.give_back(room, wiped=block.purged)
                    prefetcher.stopped(nbytes, for_good=whole is None or block.doomed)
                tiers.release([block])
                self._changed.notify_all()

    def _read(self, reader: RecordReader, block: Block, room: Residence) -> bool:
        """Whether all of a block is in its place; False when a request came first."""
        raw = room.tier.view(room.extent, block.nbytes)
        for frame in block.namespace.frames(block.length):
            if self._closing or self._until_quiet():
                return False
            reader.read(block.namespace.layout, frame.start, raw[frame])
        return True

    # -- what a hint points at --------------------------------------------------------------------------------------

    def _look_at(self, key: Hashable, hint: _Hint) -> None:
        space = hint.space
        near = []
        if hint.text and (semantics := space.semantics) is not None:
            near = [number for number, _ in semantics.nearest(hint.text, _NEIGHBOURS)]
        with self._tiers.lock:
            signs: list[tuple[int, Sign]] = []
            if hint.tokens is not None:
                blocks = self._blocks_of(space, hint.tokens)
                signs += [(block.number, Sign("tokens")) for block in blocks]
                if hint.session is not None:
                    self._remember(key, blocks)
            elif hint.session is not None:
                signs += [(block.number, Sign("session")) for block in self._last_of(space, key)]
            if hint.text and space.semantics is None:
                self._tiers.counts["hints_without_semantics"] += 1
            if hint.text:
                signs += _near(space, near, min(_WORDS, len(hint.text.split())))
            self._prefetcher.hint(key, signs)

    def _blocks_of(self, space: Namespace, tokens: NDArray[np.int32]) -> list[Block]:
        """What a look-up of these tokens finds, wherever it stands."""
        path, length = space.match(tokens)
        runs = space.moved(tokens, length, ()) if length < len(tokens) else []
        return list(dict.fromkeys([*path, *(block for run in runs for block in own_blocks(run.blocks))]))

    def _remember(self, key: Hashable, blocks: Sequence[Block]) -> None:
        self._sessions[key] = [block.number for block in blocks]
        self._sessions.move_to_end(key)
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)

    def _last_of(self, space: Namespace, key: Hashable) -> list[Block]:
        """Blocks of a session's last prompt that are still held, and what was put behind them by nobody else."""
        held = [block for number in self._sessions.get(key, ()) if (block := space.block(number)) is not None]
        if not held:
            return []
        self._sessions.move_to_end(key)
        while len(behind := space.children(held[-1])) == 1:
            held.append(behind[0])
        return held

    # -- what the prefetcher asks -----------------------------------------------------------------------------------

    def _read_of(self, number: int) -> Read | None:
        block = self._tiers.blocks.get(number)
        if block is None or block.memory is not None or not block.cold_bytes or block.doomed:
            return None
        if block.namespace.identity is None:
            return None
        page = self._tiers.profile.alignment
        speed = self._tiers.flash.bytes_per_second()
        seconds = block.cold_bytes / speed if speed else self._costs.load_seconds(block.cold_bytes, "cold")
        saved = max(0.0, seconds - self._costs.load_seconds(block.nbytes, "warm"))
        return Read(-(-block.nbytes // page) * page, block.cold_bytes, seconds, saved)

    def _in_memory(self, number: int) -> bool:
        block = self._tiers.blocks.get(number)
        return block is not None and block.memory is not None

    def _state(self, number: int) -> State | None:
        if self._in_memory(number):
            return "hit"
        if self._prefetcher.is_coming(number):
            return "pending"
        block = self._tiers.blocks.get(number)
        return None if block is None or not block.cold_bytes else "flash"


def _near(space: Namespace, numbers: Iterable[int], words: int) -> list[tuple[int, Sign]]:
    """Blocks near to a query of so many words, nearest first, and those beside them: together they are its texts.

    Blocks of one prompt that follow one another are one text; its rank is that of its nearest block.
    """
    texts: list[list[Block]] = []
    for block in map(space.block, numbers):
        if block is None:
            continue
        text = next((text for text in texts if any(_adjacent(block, each) for each in text)), None)
        if text is None:
            texts.append([block])
        else:
            text.append(block)
    signs: list[tuple[int, Sign]] = []
    for rank, text in enumerate(texts[:_PASSAGES]):
        signs += [(block.number, Sign("near", rank, words)) for block in text]
        first, last = min(text, key=lambda block: block.start), max(text, key=lambda block: block.start)
        children = space.children(last)
        beside = [space.by_key.get(first.parent_key), children[0] if len(children) == 1 else None]
        signs += [(block.number, Sign("beside", rank, words)) for block in beside if block is not None]
    return signs


def _adjacent(block: Block, other: Block) -> bool:
    return block.parent_key == other.key or other.parent_key == block.key
