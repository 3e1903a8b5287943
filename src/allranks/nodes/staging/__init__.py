"""Stage code, packages, model and data for nodes without access to them: build once, send where missing, verify,
remove.

bundle = build(spec)                                        # on the login node, or: allranks stage SPEC
with staged(bundle, Allocation.current()) as manifest:      # inside the job
    manifest.of("n2").python, manifest.of("n2").environment()
"""
