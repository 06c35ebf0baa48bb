"""Jobs on Ray: an actor per process, reserved together as one placement group.

| module | runs in |
|---|---|
| ``ray_backend`` | the launcher, which imports no ray |
| ``paceline.launch.remote.shell`` | a child of the launcher, one per process of the job |
| ``driver`` | a child of the launcher |
| ``actor`` | Ray's workers |
"""
