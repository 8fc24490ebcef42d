"""Families: one file each. A family owns its decoder, name map, position rule and declared facts.

Must not touch drafters, the engine or any length: `forward` writes provisional rows and nothing moves.
"""
