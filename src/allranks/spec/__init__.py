"""The spec, that is the user's request: records, loading, validation, JSON Schema."""

from allranks.spec.loader import load_spec, parse_spec, spec_to_dict, spec_to_yaml
from allranks.spec.records import RunSpec

__all__ = ["RunSpec", "load_spec", "parse_spec", "spec_to_dict", "spec_to_yaml"]
