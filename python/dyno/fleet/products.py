"""Facts of GPU products that node labels or nvidia-smi leave out: SM count, compute capability, power limit.

The numbers are the ones that NVIDIA publishes for the whole card. The default power limit is the one of the
reference card. Cards of other vendors may differ, so a match that depends on it says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """A GPU product, by its NVML name."""

    name: str
    capability: str
    sm_count: int
    power_w: float | None
    """Default power limit in watts; None if it applies to a whole module or laptop."""


def _row(capability: str, *cards: tuple[str, int, float | None]) -> list[Product]:
    return [Product(name, capability, sms, watts) for name, sms, watts in cards]


_TABLE = [
    *_row("7.5", ("Tesla T4", 40, 70), ("Quadro RTX 6000", 72, 260), ("Quadro RTX 8000", 72, 260)),
    *_row(
        "8.0",
        ("A100-SXM4-40GB", 108, 400),
        ("A100-SXM4-80GB", 108, 400),
        ("A100-PCIE-40GB", 108, 250),
        ("A100 80GB PCIe", 108, 300),
        ("A30", 56, 165),
    ),
    *_row(
        "8.6",
        ("A10", 72, 150),
        ("A40", 84, 300),
        ("RTX A4000", 48, 140),
        ("RTX A5000", 64, 230),
        ("RTX A6000", 84, 300),
        ("GeForce RTX 3060", 28, 170),
        ("GeForce RTX 3060 Ti", 38, 200),
        ("GeForce RTX 3070", 46, 220),
        ("GeForce RTX 3070 Ti", 48, 290),
        ("GeForce RTX 3080", 68, 320),
        ("GeForce RTX 3080 Ti", 80, 350),
        ("GeForce RTX 3090", 82, 350),
        ("GeForce RTX 3090 Ti", 84, 450),
    ),
    *_row(
        "8.9",
        ("L4", 58, 72),
        ("L40", 142, 300),
        ("L40S", 142, 350),
        ("RTX 6000 Ada Generation", 142, 300),
        ("GeForce RTX 4060", 24, 115),
        ("GeForce RTX 4070", 46, 200),
        ("GeForce RTX 4070 SUPER", 56, 220),
        ("GeForce RTX 4070 Ti", 60, 285),
        ("GeForce RTX 4070 Ti SUPER", 66, 285),
        ("GeForce RTX 4080", 76, 320),
        ("GeForce RTX 4080 SUPER", 80, 320),
        ("GeForce RTX 4090", 128, 450),
        ("GeForce RTX 4090 D", 114, 425),
    ),
    *_row(
        "9.0",
        ("H100 80GB HBM3", 132, 700),
        ("H100 PCIe", 114, 350),
        ("H100 NVL", 132, 400),
        ("H200", 132, 700),
        ("H200 NVL", 132, 600),
        ("H20", 78, 500),
        ("GH200 480GB", 132, None),
    ),
    *_row("10.0", ("B200", 148, 1000)),
    *_row(
        "12.0",
        ("GeForce RTX 5070", 48, 250),
        ("GeForce RTX 5070 Ti", 70, 300),
        ("GeForce RTX 5080", 84, 360),
        ("GeForce RTX 5090", 170, 575),
        ("RTX PRO 6000 Blackwell Server Edition", 188, 600),
        ("RTX PRO 6000 Blackwell Workstation Edition", 188, 600),
    ),
    *_row("12.1", ("GB10", 48, None)),
]


def plain_name(name: str) -> str:
    """A product name in a common spelling. Labels write `-` for a space, and some sources leave out the
    vendor."""
    words = re.split(r"[\s_-]+", name.strip().lower())
    return "-".join(w for w in words if w not in ("nvidia", "tesla", ""))


PRODUCTS = {plain_name(row.name): row for row in _TABLE}


def find_product(name: str) -> Product | None:
    """The product with a name from NVML or a node label; None if the table lacks it."""
    return PRODUCTS.get(plain_name(name))
