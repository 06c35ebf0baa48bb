"""The account of a step, and verdicts about it: the slow machine, and the reason.

| file | holds |
|---|---|
| ``account.py`` | the parts of a step, and accounts of rounds (pure) |
| ``meter.py`` | the account of this process: a clock in exactly one part, its thread, collections, data loaders |
| ``host.py`` | figures of Linux about this process: throttling, run queue, page faults |
| ``history.py`` | a worker's last rounds, and the times that they are compared with (pure) |
| ``causes.py`` | the cause that explains the excess of a slow worker, or the loss of its share (pure) |
| ``servers.py`` | servers that hold workers up (pure) |
| ``detector.py`` | the slow workers, the part that explains it, its first round, and the cost (pure) |
| ``verdicts.py`` | verdicts as sentences (pure) |
| ``reports.py`` | figures that a worker's script reports, and how far it is |
| ``job_figures.py`` | the figures of the job that follow from them (pure) |
| ``trackers.py`` | tools that keep the figures: files, TensorBoard, Weights & Biases and others |
| ``tracking.py`` | threads that run them |
| ``prometheus.py`` | the figures as Prometheus's text (pure) |
| ``job_view.py`` | a job as its status has it; every picture of a job is made of this (pure) |
| ``page_history.py`` | the history of a job for its page, bounded (pure) |
| ``page.py``, ``page.html`` | the page of a job |
| ``events.py``, ``ring.py`` | kinds of events (pure); the last events of this process in a file that survives it |
| ``clocks.py`` | the distance between two clocks (pure) |
| ``recording.py`` | this process's part of a trace |
| ``event_order.py`` | events of several processes in one order, and who waited for whom (pure) |
| ``chrome.py``, ``story.py`` | the same as a Chrome trace, and as lines (pure) |
| ``trace_file.py`` | files of Chrome traces |
"""
