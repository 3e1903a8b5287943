"""What the user asked for: records, reading and checking, JSON Schema."""

from allranks.spec.load import load_spec, parse_spec, spec_to_dict, spec_to_yaml
from allranks.spec.records import RunSpec

__all__ = ["RunSpec", "load_spec", "parse_spec", "spec_to_dict", "spec_to_yaml"]
