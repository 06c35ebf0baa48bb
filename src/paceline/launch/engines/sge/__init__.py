"""Jobs on Grid Engine: one job with a parallel environment; inside, an agent per host.

| where | what |
|---|---|
| the user's shell | writes a folder with the spec, submits a script with ``qsub -sync y``, shows its output |
| first host of the job | the script runs :mod:`paceline.launch.engines.sge.inside`, which supervises |
| each host of the job | an agent, started with ``qrsh -inherit``, so that Grid Engine ends it with the job |
"""
