"""Workers that are killed in the middle of transactional jobs of Django's ORM."""

from __future__ import annotations

import subprocess
import sys

import psycopg
import pytest
from shop.models import Letter, Order

from pgdefer import Retry
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Attempt, Job
from workers import wait_for

from .conftest import PROJECT, environment_of

pytestmark = [pytest.mark.client, pytest.mark.long]

# argv: how many to kill. Django is set up once; each worker is a fork of this process, which has no
# connection. Each is killed where its plan says: after some jobs, in the transaction before the
# write, in it after the write, as soon as the write is done (so about when the outcome commits),
# or up to 30 ms after a job began. In the first two the handler waits there for its death.
PROGRAM = """
import os, random, select, signal, sys, threading, time
import django

django.setup()
from pgdefer.contrib.django import app
from shop.models import Letter, Order

app.import_tasks()
del app.tasks["shop.tasks.stamp"]
# Of each plan: where the handler tells that it is there.
TELLS = {"before": "before", "written": "written", "committing": "written", "anywhere": "before"}


def work(pipe, where, after):
    lock, begun, told = threading.Lock(), [], []

    def place(name):
        with lock:
            if name == "before":
                begun.append(name)
            was_told = bool(told)
            tells = not was_told and name == TELLS[where] and len(begun) > after
            if tells:
                told.append(name)
        if tells:
            os.write(pipe, b"!")
        # the other thread begins nothing more, or it would take the jobs of the workers to come
        if tells and name == where or was_told and name == "before":
            threading.Event().wait()

    @app.task(name="shop.tasks.stamp", transactional=True)
    def stamp(text):
        place("before")
        Letter.objects.create(order=Order.objects.earliest("id"), text=text)
        place("written")

    app.run_worker(concurrency=2, dead_after=1, heartbeat_every=0.3)


def start(number):
    reading, writing = os.pipe()
    where = list(TELLS)[number % 4]
    pid = os.fork()
    if not pid:
        try:
            work(writing, where, number // 4 % 3)
        finally:
            os._exit(1)
    os.close(writing)
    return reading, (pid, where)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


wanted = int(sys.argv[1])
running = dict(start(number) for number in range(4))
started = 4
try:
    while running:
        ready, _, _ = select.select(list(running), [], [], 120)
        assert ready, "no worker has begun a job for two minutes"
        for reading in ready:
            pid, where = running[reading]
            said = os.read(reading, 1)
            assert said == b"!", f"a worker ended by itself, which was to die {where}"
            if where == "anywhere":
                time.sleep(random.random() * 0.03)
            del running[reading]
            kill(pid)
            os.close(reading)
            if started < wanted:
                running.update([start(started)])
                started += 1
finally:
    # they hold this program's error output, for whose end the test waits
    for pid, _ in running.values():
        os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.parametrize("kills", [24, pytest.param(500, marks=pytest.mark.soak)])
def test_kill_9_leaves_each_effect_exactly_once(app: DjangoApp, shop: str, kills: int) -> None:
    Order.objects.create(customer="Ann", total=1)
    stamp = app.get("shop.tasks.stamp").configure(retry=Retry(None, max_crashes=None))
    count = kills * 5  # a worker ends at most four
    app.defer_many(stamp.prepare(str(number)) for number in range(count))
    command = [sys.executable, "-c", PROGRAM, str(kills)]
    ran = subprocess.run(
        command,
        env=environment_of(shop),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=PROJECT,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    # A drain waits for nobody's running jobs: not for those of the killed, until they are given up.
    with psycopg.connect(shop, autocommit=True) as connection:

        def are_given_up() -> bool:
            connection.execute("select queue.reap()")
            return not Job.objects.filter(state="running").exists()

        wait_for(are_given_up)
    drain = [sys.executable, str(PROJECT / "manage.py"), "pgdefer", "worker", "--drain"]
    subprocess.run(drain, env=environment_of(shop), stderr=subprocess.DEVNULL, check=True)
    states = Job.objects.values_list("state", flat=True)
    assert (len(states), set(states)) == (count, {"succeeded"})
    crashes = Attempt.objects.filter(outcome="crashed")
    # Half of the plans kill a worker that can't have ended its job.
    assert crashes.count() >= kills // 2
    texts = sorted(int(text) for text in Letter.objects.values_list("text", flat=True))
    assert texts == list(range(count))
