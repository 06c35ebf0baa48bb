from __future__ import annotations

from paceline.launch import JobSpec, Machine, describe, make_plan


def test_every_process_is_shown_with_its_command_and_variables() -> None:
    spec = JobSpec(("python", "my train.py"), 2, 1, job_id="abc", env={"GREETING": "hello you"})
    text = describe(make_plan(spec, Machine("/usr/bin/python", {"127.0.0.1": 4})))
    assert text.startswith("job abc: 1 scheduler, 1 server, 2 workers\n")
    for line in (
        "server 0 on 127.0.0.1",
        "  /usr/bin/python -P -m paceline server",
        "worker 1 on 127.0.0.1",
        "  python 'my train.py'",
        "    PACELINE_RANK=1",
        "    GREETING='hello you'",
        "    MASTER_PORT=<free port>",
    ):
        assert line in text.splitlines()
    assert text.splitlines()[-1].startswith("note: OMP_NUM_THREADS=2")


def test_key_is_masked() -> None:
    text = describe(make_plan(JobSpec(("train",), 2), Machine("python")))
    assert text.count("PACELINE_JOB_KEY=***\n") == 5
