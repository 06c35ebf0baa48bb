"""Jobs on Ray: an actor per process, reserved together as one placement group.

| module | runs in |
|---|---|
| ``bundles``, ``request``, ``backend`` | the launcher, which imports no ray |
| ``rsh`` | a child of the launcher, one per process of the job |
| ``driver`` | a child of the launcher |
| ``actor`` | Ray's workers |
"""
