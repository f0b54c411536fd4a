"""What daemon and clients say to each other: frames and messages. `docs/protocol.md` says it in prose.

    frame      length of what follows (4 bytes, little endian), then one message in msgpack
    message    an array: its tag, then its fields in order

A client greets with `Hello`, of which every version understands the first two fields, and gets `Welcome` or `Refused`.
From then on it sends requests, as many at a time as it likes, each with a number of its own; replies carry that number
and come in any order. Number 0 asks for no reply. `Tiles` and `Retired` come by themselves. Token ids are raw int32,
little endian. KV never goes through the socket, see `shared_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from kvstore.sent_costs import SentCosts

PROTOCOL = 4
MAX_FRAME = 4 << 20
"""Bytes of the longest message: 1,000,000 tokens."""

HEADER = 4
NO_REPLY = 0

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Tokens = Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME)]
Payload = bytes | memoryview
"""One message, without its length."""


class FrameError(ValueError):
    """Bytes that are no frame, or a message that is none."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Fields by position, after the tag."""


# -- greeting ----------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="kvstore"):
    """The first frame of a client. Later versions may append fields."""

    protocol: int
    client: Annotated[str, msgspec.Meta(max_length=200)] = ""
    pid: int = 0


class Arena(Message, frozen=True):
    """Memory that comes with a reply as a descriptor, to be mapped for reading. No other ever has its number."""

    number: Count
    size: Count


class Welcome(Message, frozen=True, tag=1):
    """What holds for the connection.

    lease_seconds: a lease that the client did not use or renew for so long ends. codec: as in the profile.
    hot_in_client: what an NPU reads cannot be shared, see `TakeHot`.
    """

    protocol: int
    pid: int
    block_tokens: int
    lease_seconds: float
    codec: str
    path: str | None
    hot_in_client: bool = False


class Refused(Message, frozen=True, tag=2):
    """Why the daemon closes the connection, as its last frame. `protocols`: the versions that it speaks."""

    reason: str
    protocols: list[int]


# -- what requests and replies share -----------------------------------------------------------------------------------


class HotRoom(Message, frozen=True):
    """At most `arenas` pinned buffers of `arena_bytes`. The policy `eviction` says what leaves them, by the costs of
    `device`."""

    arenas: Count
    arena_bytes: Count
    alignment: Annotated[int, msgspec.Meta(ge=1)]
    eviction: str
    device: str


class Wanted(Message, frozen=True):
    """Blocks, by key, and their tokens. busy: there are more, but just now the embedder has enough to do. embeds: the
    daemon has an embedder."""

    blocks: list[tuple[Key, Tokens]]
    busy: bool
    embeds: bool


class BlockRef(Message, frozen=True, gc=False):
    """A block as a client knows it; `block.HeldBlock`. No other block has its number as long as the daemon lives."""

    number: int
    key: bytes
    start: int
    length: int
    nbytes: int
    cold_bytes: int
    tier: str

    @property
    def in_memory(self) -> bool:
        return self.tier in ("hot", "warm")


class PieceRef(Message, frozen=True):
    """`length` tokens from `offset` on of the block that stands at `block` in the table of blocks beside it."""

    block: Count
    offset: Count
    length: Count


class RunRef(Message, frozen=True):
    """A moved run: its pieces stand from `target` on in the prompt, one behind the other."""

    target: Count
    pieces: list[PieceRef]


# -- requests ----------------------------------------------------------------------------------------------------------


class Request(Message, frozen=True):
    id: Count


class Open(Request, frozen=True, tag=10):
    """Work with the KV of `identity` (`Identity.to_bytes`). Answered by `Opened`.

    keys: that its tenant's KV lies under on flash, none for what the daemon has for it; two while they change, the new
    one last.
    """

    identity: bytes
    keys: Annotated[list[Key], msgspec.Meta(max_length=2)] = []

    def __repr__(self) -> str:
        return f"Open({self.id}, …)"  # keys are never shown


class Lookup(Request, frozen=True, tag=11):
    """As `KVStore.lookup`; with `lease`, what is found is leased at once. Answered by `Found` or `Leased`."""

    view: Count
    tokens: Tokens
    moved: bool
    boundaries: list[Count]
    lease: bool


class TakeLease(Request, frozen=True, tag=12):
    """Lease the first `length` tokens, in the first `prefix` blocks of `keys`, and `runs`. Answered by `Leased`."""

    view: Count
    length: Count
    keys: list[Key]
    prefix: Count
    runs: list[RunRef]


class Release(Request, frozen=True, tag=13):
    """End a lease, and loads of it. Answered by `Done`."""

    lease: Count


class Renew(Request, frozen=True, tag=14):
    """The lease is in use. Answered by `Done`."""

    lease: Count


class Bring(Request, frozen=True, tag=15):
    """Read blocks of a lease that only flash holds. Answered by `Brought`, then `Tiles`.

    tiles: block (its place in `Leased.blocks`) and layer group, in the order in which they are needed. load: a number
    of the client's own, by which `Tiles` and `EndBring` name it.
    """

    lease: Count
    load: Count
    tiles: Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=1 << 18)]


class EndBring(Request, frozen=True, tag=16):
    """What was brought is not read any more. Answered by `Done`."""

    lease: Count
    load: Count


class Held(Request, frozen=True, tag=17):
    """How much of these tokens a put need not give. Answered by `HeldTokens`."""

    view: Count
    tokens: Tokens


class Staging(Request, frozen=True, tag=18):
    """Memory for puts, `nbytes` if there is as much; once a connection. Answered by `StagingGiven`."""

    nbytes: Count


class Put(Request, frozen=True, tag=19):
    """As `KVStore.put`: the KV of tokens[start:] lies at `offset` in the staging memory, in canonical raw form.

    It may be read after the reply, and is before the next request is answered. fresh: how many blocks of this prompt
    come with it, in this put and those before and behind; 0 for what this one shows. Answered by `Stored`.
    """

    view: Count
    tokens: Tokens
    start: Count
    offset: Count
    fresh: Count = 0


class PutInexact(Request, frozen=True, tag=20):
    """As `KVStore.put_inexact` for the span tokens[start:], whose KV lies as in `Put`. Answered by `Stored`, then."""

    view: Count
    tokens: Tokens
    start: Count
    offset: Count


class Served(Request, frozen=True, tag=21):
    """As `KVStore.served`. Answered by `Done`."""

    view: Count
    prefix: Count
    moved: Count
    recomputed: Count
    computed: Count
    unsure: bool = False
    seconds: float = 0.0
    waited: float = 0.0
    without: float | None = None


class Move(Request, frozen=True, tag=22):
    """As `KVStore.promote` to hot or warm memory, or `demote` to flash. Answered by `Answer`: int, blocks demoted."""

    view: Count
    keys: list[Key]
    to: Literal["hot", "warm", "cold"]


class Invalidate(Request, frozen=True, tag=23):
    """As `KVStore.invalidate`. Answered by `Answer`: int."""

    view: Count
    prefix: Tokens | None
    adapter: str | None
    older_than: float | None
    everything: bool


class Flush(Request, frozen=True, tag=24):
    """As `KVStore.flush`. Answered by `Done`, once all is durable."""


class GetStats(Request, frozen=True, tag=25):
    """Answered by `Answer`: `Stats`."""

    view: Count


class GetVerdict(Request, frozen=True, tag=26):
    """Answered by `Answer`: `Verdict`."""

    view: Count


class KeepVerdict(Request, frozen=True, tag=27):
    """verdict: a `Verdict` in msgpack. Answered by `Done`."""

    view: Count
    verdict: bytes


class Explain(Request, frozen=True, tag=28):
    """As `KVStore.explain`. Answered by `Answer`: `Explanation`."""

    view: Count
    tokens: Tokens
    policy: Literal["exact", "careful", "fast"]
    boundaries: list[Count]
    costs: SentCosts | None
    layer_groups: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    shift_refused: str | None


class Neighbours(Request, frozen=True, tag=29):
    """As `KVStore.neighbours`, of `text`, or of `tokens` where it is None. Answered by `Answer`: (BlockRef, float)s."""

    view: Count
    text: str | None
    tokens: Tokens
    k: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Check(Request, frozen=True, tag=30):
    """As `KVStore.check`. Answered by `Done`."""


class Hint(Request, frozen=True, tag=31):
    """As `KVStore.hint`. Answered by `Done`."""

    view: Count
    tokens: Tokens | None
    text: Annotated[str, msgspec.Meta(max_length=1 << 20)] | None
    session: Annotated[str, msgspec.Meta(max_length=200)] | None


class GetPresence(Request, frozen=True, tag=34):
    """As `KVStore.presence`, or with `fetch` as `KVStore.prefetch`, of what `TakeLease` would name.

    timeout: in seconds, None waits for the end. Answered by `Answer`: `Presence`.
    """

    view: Count
    length: Count
    keys: list[Key]
    prefix: Count
    runs: list[RunRef]
    fetch: bool
    timeout: Annotated[float, msgspec.Meta(ge=0)] | None


class Admin(Request, frozen=True, tag=32):
    """A verb of `admin.administration`; arguments: a msgpack map. Answered by `Answer`: what the verb returns."""

    verb: Annotated[str, msgspec.Meta(max_length=64)]
    arguments: bytes


class GetSnapshot(Request, frozen=True, tag=33):
    """What happens just now, as `kvstore.watch.snapshot` has it. Answered by `Answer`."""


class TakeHot(Request, frozen=True, tag=35):
    """Memory that an NPU reads, in arenas that take a block of `block_bytes`, to have in the client's own process.

    A second one replaces the first. Answered by `Answer`: `HotRoom`.
    """

    block_bytes: Count


class KeepHot(Request, frozen=True, tag=36):
    """The client has copies of these blocks, by the number and the key that replies gave them.

    Answered by `Answer`: the numbers of those that are not held any more, whose copies have to go.
    """

    view: Count
    numbers: list[Count]
    keys: list[Key]


class LeaveHot(Request, frozen=True, tag=37):
    """Nothing lies any more in what `TakeHot` gave. Answered by `Done`."""


class WantTexts(Request, frozen=True, tag=38):
    """Which blocks of this identity does the daemon want to know the text of, `most` at a time? Answered by `Answer`:
    `Wanted`."""

    view: Count
    most: Annotated[int, msgspec.Meta(ge=1, le=1024)]


class TellTexts(Request, frozen=True, tag=39):
    """Texts of blocks, by their keys. Answered by `Done`."""

    view: Count
    texts: Annotated[
        list[tuple[Key, Annotated[str, msgspec.Meta(max_length=1 << 14)]]], msgspec.Meta(max_length=1024)
    ]


AnyRequest = (
    Open
    | Lookup
    | TakeLease
    | Release
    | Renew
    | Bring
    | EndBring
    | Held
    | Staging
    | Put
    | PutInexact
    | Served
    | Move
    | Invalidate
    | Flush
    | GetStats
    | GetVerdict
    | KeepVerdict
    | Explain
    | Neighbours
    | Check
    | Hint
    | GetPresence
    | Admin
    | GetSnapshot
    | TakeHot
    | KeepHot
    | LeaveHot
    | WantTexts
    | TellTexts
)


# -- replies -----------------------------------------------------------------------------------------------------------


class Done(Message, frozen=True, tag=100):
    id: int


class Failed(Message, frozen=True, tag=101):
    """The request was not carried out. `kind` names a class of `kvstore.errors`, or is "internal"."""

    id: int
    kind: str
    reason: str


class Opened(Message, frozen=True, tag=102):
    """`view` stands for the identity in requests. layer_groups: first and last + 1 layer of each."""

    id: int
    view: int
    layer_groups: list[tuple[int, int]]


class Found(Message, frozen=True, tag=103):
    """The first `length` tokens are held, in the first `prefix` of `blocks`; `runs` elsewhere."""

    id: int
    length: int
    blocks: list[BlockRef]
    prefix: int
    runs: list[RunRef]


class Leased(Message, frozen=True, tag=104):
    """As `Found`, of what is leased now, under `lease`.

    places: (number of arena, offset) of each block that lies in memory, (-1, 0) for others. flash_bytes_per_second: as
    `Lease.flash_bytes_per_second`. arenas: of these places, those that this client was not given before; their
    descriptors, in this order, come with this frame.
    """

    id: int
    lease: int
    length: int
    blocks: list[BlockRef]
    prefix: int
    runs: list[RunRef]
    places: list[tuple[int, int]]
    whole: bool
    flash_bytes_per_second: float | None
    arenas: list[Arena]


class Brought(Message, frozen=True, tag=105):
    """Where the blocks of a `Bring` will lie: block -> place, as in `Leased`; those without have no room."""

    id: int
    places: dict[int, tuple[int, int]]
    arenas: list[Arena]


class Tiles(Message, frozen=True, tag=106):
    """Tiles of a load, by their place in `Bring.tiles`, that lie in memory now, and those that will not, and why."""

    load: int
    there: list[int]
    failed: dict[int, str]
    bytes_read: int


class Retired(Message, frozen=True, tag=111):
    """The daemon gave an arena up, in which nothing is leased: unmap it."""

    arena: int


class HeldTokens(Message, frozen=True, tag=107):
    id: int
    tokens: int


class StagingGiven(Message, frozen=True, tag=108):
    """A descriptor of `nbytes` of memory comes with this frame; none when nbytes is 0."""

    id: int
    nbytes: int


class Stored(Message, frozen=True, tag=109):
    """A `PutResult`."""

    id: int
    stored: int
    held: int
    refused: int
    reason: str | None


class Answer(Message, frozen=True, tag=110):
    """body: in msgpack, of the type that the request names."""

    id: int
    body: bytes


AnyReply = (
    Done | Failed | Opened | Found | Leased | Brought | Tiles | HeldTokens | StagingGiven | Stored | Answer
)
Greeting = Welcome | Refused
Outgoing = AnyReply | Retired | Greeting

_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_request = msgspec.msgpack.Decoder(AnyRequest)
_reply = msgspec.msgpack.Decoder(AnyReply | Retired | Refused)
_greeting = msgspec.msgpack.Decoder(Greeting)


def frame(message: msgspec.Struct) -> bytearray:
    """A message as it goes over the socket. Raises FrameError for one that is too long."""
    packed = bytearray(HEADER)
    _encoder.encode_into(message, packed, HEADER)
    length = len(packed) - HEADER
    if length > MAX_FRAME:
        raise FrameError(f"a message of {length} bytes, {MAX_FRAME} are the most")
    packed[:HEADER] = length.to_bytes(HEADER, "little")
    return packed


def hello(payload: Payload) -> Hello:
    """Raises FrameError."""
    return _decoded(_hello, payload)  # type: ignore[no-any-return]


def request(payload: Payload) -> AnyRequest:
    """Raises FrameError."""
    return _decoded(_request, payload)  # type: ignore[no-any-return]


def reply(payload: Payload) -> AnyReply | Retired | Refused:
    """Raises FrameError."""
    return _decoded(_reply, payload)  # type: ignore[no-any-return]


def greeting(payload: Payload) -> Greeting:
    """Raises FrameError."""
    return _decoded(_greeting, payload)  # type: ignore[no-any-return]


def _decoded(decoder: Any, payload: Payload) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8
        raise FrameError(str(error)) from error


class Frames:
    """Cuts a stream of bytes into messages, whatever pieces it comes in. `limit`: bytes of the longest."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._bytes = bytearray()

    @property
    def waiting(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._bytes)

    def feed(self, data: bytes | memoryview) -> Iterator[Payload]:
        """The messages that `data` completes, each good as long as `data` stays as it is.

        Raises FrameError; nothing of the stream can be trusted then.
        """
        held = self._bytes
        at = 0
        if not held:  # as a rule: nothing has to be copied
            given = memoryview(data)
            while (end := self._end(given, at)) is not None:
                yield given[at + HEADER : end]
                at = end
            held += given[at:]
            return
        held += data
        try:
            while (end := self._end(held, at)) is not None:
                begin, at = at + HEADER, end
                yield bytes(held[begin:end])
        finally:
            del held[:at]

    def _end(self, stream: bytearray | memoryview, at: int) -> int | None:
        """Where the message that begins at `at` ends, None when it is not complete. Raises FrameError."""
        if len(stream) - at < HEADER:
            return None
        length = int.from_bytes(stream[at : at + HEADER], "little")
        if not 0 < length <= self.limit:
            raise FrameError(f"a frame of {length} bytes, between 1 and {self.limit} are allowed")
        end = at + HEADER + length
        return end if end <= len(stream) else None
