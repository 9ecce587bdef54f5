"""The forms in which packed matrices are stored, and the GGUF formats with the form that keeps each exactly."""

from __future__ import annotations

from dataclasses import dataclass

PANEL, GROUP = 16, 32  # src/formats.h


@dataclass(frozen=True)
class PanelForm:
    """One way in which rows are stored in panels."""

    number: int
    name: str
    codes: int  # bytes of codes per panel and group of 32 columns, or per column where dense
    chunk: int = 1  # groups that have their scales in one place
    scales: int = 0  # bytes of these; 0: floats, which have none

    @property
    def is_dense(self) -> bool:
        return self.scales == 0

    def panel_bytes(self, columns: int) -> int:
        if self.is_dense:
            return -(-self.codes * columns // 64) * 64
        groups = columns // GROUP
        return -(-groups // self.chunk) * self.scales + groups * self.codes

    def nbytes(self, rows: int, columns: int) -> int:
        return -(-rows // PANEL) * self.panel_bytes(columns)


F32 = PanelForm(0, "f32", 64)
F16 = PanelForm(1, "f16", 32)
BF16 = PanelForm(2, "bf16", 32)
INT4 = PanelForm(3, "int4", 256, 2, 64)  # scale per 32 columns
INT4_MIN = PanelForm(4, "int4+min", 256, 1, 64)  # scale and minimum per 32 columns
INT4_K = PanelForm(5, "int4k", 256, 8, 320)
INT5 = PanelForm(6, "int5", 320, 2, 64)
INT5_MIN = PanelForm(7, "int5+min", 320, 1, 64)
INT5_K = PanelForm(8, "int5k", 320, 8, 320)
INT6_K = PanelForm(9, "int6k", 384, 8, 320)
INT8 = PanelForm(10, "int8", 512, 2, 64)  # scale per 32 columns
INT8_K = PanelForm(11, "int8k", 512, 8, 320)

FORMS = (F32, F16, BF16, INT4, INT4_MIN, INT4_K, INT5, INT5_MIN, INT5_K, INT6_K, INT8, INT8_K)


@dataclass(frozen=True)
class GGUFFormat:
    """One way in which files store rows: in blocks of `values` numbers and `size` bytes."""

    number: int  # as GGUF numbers its types
    name: str
    values: int
    size: int
    form: PanelForm  # float32 where no other keeps it
    book: tuple[int, int] | None = None  # the book its values are taken from: how many entries, of how many values


_FORMATS = (
    GGUFFormat(0, "F32", 1, 4, F32),
    GGUFFormat(1, "F16", 1, 2, F16),
    GGUFFormat(30, "BF16", 1, 2, BF16),
    GGUFFormat(2, "Q4_0", 32, 18, INT4),
    GGUFFormat(3, "Q4_1", 32, 20, INT4_MIN),
    GGUFFormat(6, "Q5_0", 32, 22, INT5),
    GGUFFormat(7, "Q5_1", 32, 24, INT5_MIN),
    GGUFFormat(8, "Q8_0", 32, 34, INT8),
    GGUFFormat(10, "Q2_K", 256, 84, F32),
    GGUFFormat(11, "Q3_K", 256, 110, INT6_K),
    GGUFFormat(12, "Q4_K", 256, 144, INT4_K),
    GGUFFormat(13, "Q5_K", 256, 176, INT5_K),
    GGUFFormat(14, "Q6_K", 256, 210, INT6_K),
    GGUFFormat(16, "IQ2_XXS", 256, 66, INT8_K, (256, 8)),
    GGUFFormat(17, "IQ2_XS", 256, 74, INT8_K, (512, 8)),
    GGUFFormat(18, "IQ3_XXS", 256, 98, INT8_K, (256, 4)),
    GGUFFormat(19, "IQ1_S", 256, 50, INT8_K, (2048, 8)),
    GGUFFormat(20, "IQ4_NL", 32, 18, INT8),
    GGUFFormat(21, "IQ3_S", 256, 110, INT6_K, (512, 4)),
    GGUFFormat(22, "IQ2_S", 256, 82, INT8_K, (1024, 8)),
    GGUFFormat(23, "IQ4_XS", 256, 136, INT8_K),
    GGUFFormat(29, "IQ1_M", 256, 56, INT8_K, (2048, 8)),
    GGUFFormat(34, "TQ1_0", 256, 54, INT4),
    GGUFFormat(35, "TQ2_0", 256, 66, INT4),
    GGUFFormat(39, "MXFP4", 32, 17, F32),
    GGUFFormat(40, "NVFP4", 64, 36, F32),
)
OF_GGUF = {format.number: format for format in _FORMATS}
