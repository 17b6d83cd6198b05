"""The ledger: one shared-memory table a namespace that says what every slot holds. Only the service writes it.

Header (`header_bytes`, whole pages, little endian): magic "KVLEDGR1" | version u32 | record bytes u32
| namespace id u64 | slot bytes u64 | slots a slab u32 | slabs u32; then, at SLAB_TABLE, one u32 a slab range: the id of
the slab whose slots it describes (0 = none). Slot s of the slab in range r has record r * slots_a_slab + s.

Record (128 bytes): word u64 = generation << 32 | state | slab id u32 | slot u32 | tokens u32 | error f32 | checksum u64
| digest 32 | parent 32 | owner's instance id 16 | 0 16.

The error is the block's rounding error relative to what it holds, as its writer measured it (kvstore_kernels.noise).
Version 1 had no errors.

Commit is one aligned store: all other fields are written first, then the word, as one native 8-byte store. A reader
that sees the committed word with generation g sees the fields of that block; after a copy it compares the word again.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

from kvstore.device.base import SlabMemory
from kvstore.store.slots import SlotState

MAGIC = b"KVLEDGR1"
VERSION = 2
RECORD_BYTES = 128
SLAB_TABLE = 128
_HEADER = struct.Struct("<8sIIQQII")
_PLACE = struct.Struct("<II")
_CONTENT = struct.Struct("<IfQ32s32s")
_OWNER = struct.Struct("<16s")
_PLACE_AT, _CONTENT_AT, _OWNER_AT = 8, 16, 96
_GENERATIONS = 1 << 32


@dataclass(frozen=True, slots=True)
class Record:
    """One record, read back. Fields after `generation` mean something only in the states that set them."""

    state: SlotState
    generation: int
    slab_id: int
    slot: int
    tokens: int
    error: float
    checksum: int
    digest: bytes
    parent: bytes
    owner: bytes


def header_bytes(slabs: int) -> int:
    """Bytes before the first record: whole pages."""
    return -(-(SLAB_TABLE + 4 * slabs) // mmap.PAGESIZE) * mmap.PAGESIZE


def ledger_bytes(slabs: int, slots_per_slab: int) -> int:
    """Bytes of a ledger for `slabs` slabs: whole pages."""
    records = slabs * slots_per_slab * RECORD_BYTES
    return header_bytes(slabs) + -(-records // mmap.PAGESIZE) * mmap.PAGESIZE


class Ledger:
    """The records of one namespace over `memory`, which it owns.

    Invariant: a record's word changes only after its other fields are complete, and its generation only grows.
    """

    def __init__(
        self, memory: SlabMemory, *, namespace_id: int, slot_bytes: int, slots_per_slab: int, slabs: int
    ) -> None:
        self.memory = memory
        self.slots_per_slab = slots_per_slab
        self.records = slabs * slots_per_slab
        self._base = header_bytes(slabs)
        self._view = memory.view[: self._base + self.records * RECORD_BYTES]
        self._words = self._view.cast("Q")
        _HEADER.pack_into(self._view, 0, MAGIC, VERSION, RECORD_BYTES, namespace_id, slot_bytes, slots_per_slab, slabs)

    def attach_slab(self, slab_range: int, slab_id: int) -> None:
        """Gives the records of a range to a slab. Generations go on from where the range's former slab left them."""
        first = slab_range * self.slots_per_slab
        for slot in range(self.slots_per_slab):
            _PLACE.pack_into(self._view, self._at(first + slot) + _PLACE_AT, slab_id, slot)
        struct.pack_into("<I", self._view, SLAB_TABLE + 4 * slab_range, slab_id)

    def detach_slab(self, slab_range: int) -> None:
        """Takes a range from its slab; all its slots must be free."""
        struct.pack_into("<I", self._view, SLAB_TABLE + 4 * slab_range, 0)

    def slab_in(self, slab_range: int) -> int:
        """Id of the slab in a range, 0 = none."""
        return int(struct.unpack_from("<I", self._view, SLAB_TABLE + 4 * slab_range)[0])

    def state(self, record: int) -> SlotState:
        """State of a slot."""
        return SlotState(self._words[self._at(record) >> 3] & 0xFF)

    def generation(self, record: int) -> int:
        """Generation of a slot; 0 = never used."""
        return self._words[self._at(record) >> 3] >> 32

    def set_private(self, record: int, owner: bytes) -> int:
        """Starts the next generation for `owner` (instance id) and returns it."""
        at = self._at(record)
        generation = (self._words[at >> 3] >> 32) + 1
        if generation == _GENERATIONS:
            generation = 1
        _CONTENT.pack_into(self._view, at + _CONTENT_AT, 0, 0.0, 0, b"", b"")
        _OWNER.pack_into(self._view, at + _OWNER_AT, owner)
        self._words[at >> 3] = generation << 32 | SlotState.PRIVATE
        return generation

    def set_committed(
        self, record: int, *, digest: bytes, parent: bytes, tokens: int, checksum: int, error: float
    ) -> None:
        """Makes a block visible: fields first, then the word."""
        at = self._at(record)
        _CONTENT.pack_into(self._view, at + _CONTENT_AT, tokens, error, checksum, digest, parent)
        self._words[at >> 3] = self._words[at >> 3] & ~0xFF | SlotState.COMMITTED

    def set_state(self, record: int, state: SlotState) -> None:
        """Changes the state alone (condemned, free)."""
        at = self._at(record) >> 3
        self._words[at] = self._words[at] & ~0xFF | state

    def read(self, record: int) -> Record:
        """One record, for checks and for a new server."""
        at = self._at(record)
        word = self._words[at >> 3]
        slab_id, slot = _PLACE.unpack_from(self._view, at + _PLACE_AT)
        tokens, error, checksum, digest, parent = _CONTENT.unpack_from(self._view, at + _CONTENT_AT)
        (owner,) = _OWNER.unpack_from(self._view, at + _OWNER_AT)
        return Record(SlotState(word & 0xFF), word >> 32, slab_id, slot, tokens, error, checksum, digest, parent, owner)

    def release(self) -> None:
        """Lets go of the memory's view, so that its holder can close it."""
        self._words.release()
        self._view.release()

    def _at(self, record: int) -> int:
        return self._base + record * RECORD_BYTES
