"""What is added to a SentencePiece model's file, which is one Protocol Buffers message.

Nothing has to be read for that: where such a message goes on, pieces that follow are pieces more,
and a setting that is said again replaces the one before (protobuf.dev/programming-guides/encoding,
"Last One Wins"). The class that sentencepiece generates for the message asks for a newer protobuf
than Colab has. Field numbers are those of sentencepiece_model.proto.
"""

import dataclasses
import struct

CONTROL = 3  # ModelProto.SentencePiece.Type; a piece without one is a normal one


@dataclasses.dataclass(frozen=True)
class Piece:
    text: str
    score: float = 0.0  # of two merges that could be made, the one with the higher score is
    control: bool = False  # no text becomes it

    def entry(self) -> bytes:
        """The piece as a further entry of a model's list."""
        fields = _bytes(1, self.text.encode()) + _key(2, 5) + struct.pack("<f", self.score)
        if self.control:
            fields += _key(3, 0) + _varint(CONTROL)
        return _bytes(1, fields)


def vocabulary_size(count: int) -> bytes:
    """How many pieces the model has, as its settings say."""
    return _bytes(2, _key(4, 0) + _varint(count))


def as_it_stands() -> bytes:
    """No mark before a text's first word, and no space is taken away."""
    return _bytes(3, _key(3, 0) + _varint(0) + _key(4, 0) + _varint(0))


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _bytes(field: int, payload: bytes) -> bytes:
    return _key(field, 2) + _varint(len(payload)) + payload


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last have the eighth set."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
