"""Adapters for frameworks that drive trainers and engines: `weightrefit.integrations.nemo_rl` and
`weightrefit.integrations.verl`. Each imports its framework; nothing else does.
"""
