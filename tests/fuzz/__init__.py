"""Random traffic through random engines, against plain decoding of each request alone.

`python -m tests.fuzz --seed S` plays rounds until its time is up; each follows from (seed, number).

    plan (an engine's options) -> truth and orders (requests, and what each must give)
    -> lab (the engine) -> direct, then clients (the traffic) -> check
"""
