"""Measurements: made-up scenes with known contents, and the tables drawn from them.
 Owns what a benchmark needs to know about its own inputs. Must not reach into the engine's state: a benchmark
talks to the engine as a user does.
"""
