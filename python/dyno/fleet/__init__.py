"""The nodes of a fleet and the profiles that they would use, found from descriptions without a GPU.

description ─ nodes ─> Node(device, count) ─ matching ─> Row(level, profile, reasons) ─ render ─> table, JSON
"""

from __future__ import annotations

from dyno.fleet.matching import Fleet, Row, Want, match
from dyno.fleet.nodes import Node, read_nodes
from dyno.fleet.products import PRODUCTS, Product, find_product

__all__ = ["PRODUCTS", "Fleet", "Node", "Product", "Row", "Want", "find_product", "match", "read_nodes"]
