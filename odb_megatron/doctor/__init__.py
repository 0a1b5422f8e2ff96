"""`odb-megatron doctor`: what of a machine, and of a command line, would fail or slow a run.

Facts are gathered into frozen dataclasses first; checks are pure functions of them. Must not import
torch or Megatron in the command's own process, where neither need be installed: processes of their
own look at torch (`torch_facts`) and at a command's flags and data (`flag_facts`).
"""
