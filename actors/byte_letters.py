"""How tokenizers write bytes that are no text: byte-level letters, and the pieces `<0x0A>`.

Imports nothing, so that an ingress can read a token without loading a tokenizer library.
"""

import re

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: its own where that is visible, else the next from 256 on.

    Radford et al. 2019, byte-level BPE.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_letters()


def read_byte_piece(piece: str) -> bytes | None:
    """The byte that byte fallback's piece stands for; None if it is another piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


def read_byte_letters(piece: str) -> bytes | None:
    """The bytes that a byte-level piece spells; None if it has other letters."""
    if all(letter in _BYTE_OF for letter in piece):
        return bytes(_BYTE_OF[letter] for letter in piece)
    return None
