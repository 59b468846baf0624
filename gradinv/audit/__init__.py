"""An audit of a network: its rank analysis, the attacks that apply, and what would withhold more."""

from gradinv.audit.applies import Attack
from gradinv.audit.changes import Change
from gradinv.audit.found import Audit, audit
from gradinv.audit.load import input_shape, load

__all__ = ["Attack", "Audit", "Change", "audit", "input_shape", "load"]
