"""The account of a step, and verdicts about it: which machine is slow, and why.

| file | holds |
|---|---|
| ``account.py`` | the parts of a step, and a clock that is always in exactly one of them (pure) |
| ``meter.py`` | the account of this process: its clock and thread, garbage collections, data loaders |
| ``host.py`` | figures of Linux about this process: throttling, run queue, page faults |
| ``history.py`` | a worker's last rounds, and the times that they are compared with (pure) |
| ``servers.py`` | servers that hold workers up (pure) |
| ``detector.py`` | who is slow, because of which part, since when, and what it costs (pure) |
| ``verdicts.py`` | verdicts as sentences (pure) |
"""
