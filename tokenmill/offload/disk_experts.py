"""DiskExperts: threads read the experts that a step on a CPU has chosen, and those that it is likely to choose."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

import torch

from tokenmill.errors import StepFailed
from tokenmill.model.layers import MoEWeights
from tokenmill.model.moe import experts_of
from tokenmill.model.spec import MoESpec
from tokenmill.offload.expert_rooms import ExpertLayer, parts_in
from tokenmill.offload.expert_slots import AWAY, ExpertSlots, Told
from tokenmill.offload.feed import FeedStats
from tokenmill.offload.foresight import Foresight
from tokenmill.offload.layer_file import LayerFile, room
from tokenmill.ops.native import recording
from tokenmill.ops.native.layer_wait import check_told, fence, fetch_experts, foresee_experts
from tokenmill.ops.registry import Ops
from tokenmill.plan.solve.offload import MOST

READERS = 4  # threads: as many pieces are asked of the disk at once
OVER = -(1 << 62)  # as an answer: to every call there will be, since nobody answers any more


class DiskExperts:
    """One thread hears what is wanted, decides who leaves, and has READERS others read, piece by piece.

    A slot or a buffer is given to somebody else only when its layer's call is not under way. That is seen twice:
    before it is marked as empty, and again behind that. So a call that begins in between is either seen, or finds it
    empty and asks.
    """

    def __init__(
        self,
        file: LayerFile,  # layer by layer, every expert of each
        layers: Sequence[ExpertLayer],
        slots: ExpertSlots,
        moe: MoESpec,
        foresight: Foresight,
        bandwidth: float = 0.0,  # bytes per second that the file has been read at
    ) -> None:
        self.file, self.bandwidth, self.place = file, bandwidth, str(file.path.parent)
        self.slots = slots
        check_told(len(Told), MOST)
        self._layers, self._moe = layers, moe
        self._numbers = {layer.index: number for number, layer in enumerate(layers)}
        listen, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self._worker = _Worker(file, layers, slots, foresight)
        thread = threading.Thread(target=self._worker.run, args=(listen,), name="experts", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _stop, self._bell, thread)

    @property
    def foresight(self) -> Foresight:
        return self._worker.foresight

    def bring(
        self, layer: int, x: torch.Tensor, experts: torch.Tensor, mlp: MoEWeights, ops: Ops
    ) -> tuple[torch.Tensor, MoEWeights]:
        number, slots = self._numbers[layer], self.slots
        this, is_last = self._layers[number], number == len(self._layers) - 1
        if recording.is_recording():
            buffer = slots.buffer_of(number)
            of_layer = slots.slot[number], slots.buffer[buffer], slots.owner[buffer:], slots.used[number]
            places = fetch_experts(
                experts, slots.told, *of_layer, slots.early[number], number, slots.slots, is_last, self._bell
            )
            recording.explain_with(self._check)
            if not is_last:
                after, moe = self._layers[number + 1].router, self._moe
                groups = moe.groups, moe.top_groups
                foresee_experts(
                    x, after, slots.told, slots.wish, slots.slot[number + 1], self._bell, moe.top_k, *groups
                )
            return places, mlp
        told, chosen = slots.told, torch.unique(experts).tolist()
        different = slots.call(number, chosen)
        in_buffer = this.buffer is not None and different > slots.slots
        where = [this.place(slots, number, expert, in_buffer) for expert in chosen]
        if AWAY in where:
            began = time.perf_counter_ns()
            with self._worker.changed:
                told[Told.ASKED] = call = told[Told.CALL]
                self._ring()
                self._worker.changed.wait_for(lambda: abs(told[Told.ANSWERED]) >= call)
            told[Told.STALLS] += 1
            told[Told.STALL_NS] += time.perf_counter_ns() - began
            self._check()
            where = [this.place(slots, number, expert, in_buffer) for expert in chosen]
        table = torch.zeros(slots.experts, dtype=torch.int64)
        table[chosen] = torch.tensor(where)
        most = different >= MOST * slots.experts
        if not is_last and most:
            told[Told.STREAM] = told[Told.CALL]
            self._ring()
        elif not is_last and told[Told.MAY_FORESEE]:
            _, likely = experts_of(x, self._layers[number + 1].router, self._moe, ops)
            slots.wish[torch.unique(likely).numpy()] = told[Told.CALL]
            told[Told.WISHED] = told[Told.CALL]
            self._ring()
        return table[experts], this.matrices(mlp, in_buffer)

    def stats(self) -> FeedStats:
        worker, told = self._worker, self.slots.told
        stalls, seconds = int(told[Told.STALLS]), float(told[Told.STALL_NS]) / 1e9
        return FeedStats(worker.nbytes, 0, stalls, seconds, worker.seconds, self.slots.counts())

    def close(self) -> None:
        self._close()

    def _check(self) -> None:
        """Say why experts could not be had, once: the next pass asks for them again."""
        with self._worker.changed:
            answered = self.slots.told[Told.ANSWERED]
            if answered < 0:
                if answered != OVER:
                    self.slots.told[Told.ANSWERED] = -answered
                raise StepFailed(self._worker.why)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it has rung often enough, or nobody listens
            os.write(self._bell, b"\1")


def bring_expert(file: LayerFile, layer: ExpertLayer, entry: int, slot: int) -> int:
    """While loading: read a whole expert to a slot. Returns its bytes."""
    if layer.buffer is None:
        return sum(file.read(entry, piece, layer.memory[slot]) for piece in range(file.entries[entry].pieces))
    return _read_stacked(file, entry, room(file.entries[entry].image.nbytes), layer.slots.parts(slot))


def _read_stacked(file: LayerFile, entry: int, memory: torch.Tensor, into: Sequence[torch.Tensor]) -> int:
    """By way of `memory`: what a disk reads at once are whole pages, which stacked tensors do not lie on."""
    read = sum(file.read(entry, piece, memory) for piece in range(file.entries[entry].pieces))
    _copy(into, parts_in(file.entries[entry].image, memory))
    return read


def _copy(into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    for part, there in zip(into, source, strict=True):
        part.copy_(there)


class _Job:
    """An expert on its way to a slot, or to its place in the buffer (slot None)."""

    def __init__(self, number: int, expert: int, slot: int | None, before: int, pieces: int) -> None:
        self.number, self.expert, self.slot, self.before = number, expert, slot, before
        self.left = set(range(pieces))  # that nobody has read, or given up
        self.dropped = False  # nobody waits for it: what has not begun is left
        self.skipped = False  # some of it was
        self.why: str | None = None


class _Worker:
    """The threads' side, which must not keep the feed alive."""

    def __init__(
        self, file: LayerFile, layers: Sequence[ExpertLayer], slots: ExpertSlots, foresight: Foresight
    ) -> None:
        self._file, self._layers, self._slots = file, layers, slots
        self.foresight = foresight
        slots.told[Told.MAY_FORESEE] = foresight.on
        self._jobs: dict[tuple[int, int], _Job] = {}  # by layer and expert
        stacks = any(layer.buffer is not None for layer in layers)
        largest = max(one.image.nbytes for one in file.entries)
        self._scratch = [room(largest) for _ in range(READERS)] if stacks else []
        self._looked_ahead = 0  # the last call whose next layer was
        self._began = 0.0
        self.changed = threading.Condition()  # its lock is on all of the above, and on what `slots` says where
        self.why = ""
        self.nbytes, self.seconds = 0, 0.0

    def run(self, listen: int) -> None:
        why = "experts cannot be read any more: the engine was closed"
        try:
            with ThreadPoolExecutor(READERS, thread_name_prefix="expert-reader") as readers:
                while os.read(listen, 4096)[-1:] == b"\1":
                    self._hear(readers)
                with self.changed:
                    for job in self._jobs.values():
                        job.dropped = True
        except BaseException as error:  # whatever it is, somebody may be waiting
            why = f"experts cannot be read any more: {error!r}; start the engine again"
            raise
        finally:
            with self.changed:
                self.why = why
                self._slots.told[Told.ANSWERED] = OVER
                self.changed.notify_all()
            os.close(listen)
            self._file.close()

    def _hear(self, readers: ThreadPoolExecutor) -> None:
        told = self._slots.told
        if abs(told[Told.ANSWERED]) < told[Told.ASKED]:
            self._answer(readers)
        call = int(told[Told.CALL])
        if call > self._looked_ahead and call in (told[Told.STREAM], told[Told.WISHED]):
            self._looked_ahead = call
            with self.changed:
                try:
                    self._look_ahead(call, readers)
                except Exception:  # whoever needs what was not brought asks for it, and is told why it does not come
                    self._put_right()

    # What a step waits for

    def _answer(self, readers: ThreadPoolExecutor) -> None:
        slots, told = self._slots, self._slots.told
        call, number = int(told[Told.ASKED]), int(told[Told.LAYER])
        said = call
        try:
            with self.changed:
                chosen = [int(one) for one in (slots.used[number] == call).nonzero()[0]]
                layer, wanted = self._layers[number], {(number, expert) for expert in chosen}
                kept, in_buffer = frozenset(chosen), layer.buffer is not None and len(chosen) > slots.slots
                for key, job in self._jobs.items():  # who goes to the wrong one of two stacks is no help either
                    job.dropped = key not in wanted or (layer.buffer is not None and (job.slot is None) != in_buffer)
                self._wait(lambda: not any(job.dropped for job in self._jobs.values()))
                jobs = [self._wanted(number, expert, kept, in_buffer) for expert in chosen]
                self._begin([job for job in jobs if job is not None], readers)
                started = list(self._jobs.values())
                self._wait(lambda: not self._jobs)
                lacking = [expert for expert in chosen if layer.place(slots, number, expert, in_buffer) < 0]
                if lacking:
                    reasons = [job.why for job in started if job.why is not None]
                    self.why = next(iter(reasons), f"experts {lacking} of layer {layer.index} did not come")
                    said = -call
            told[Told.MAY_FORESEE] = self.foresight.note(call, float(told[Told.STALL_NS]))
        except Exception as error:  # whatever it is, somebody waits
            self.why, said = f"experts cannot be read: {error!r}", -call
            with self.changed:
                self._put_right()
        with self.changed:
            fence()  # who sees the answer sees all that was brought
            told[Told.ANSWERED] = said
            self.changed.notify_all()

    def _wanted(self, number: int, expert: int, kept: Set[int], in_buffer: bool) -> _Job | None:
        """What has to be read so that the expert is where this step looks for it."""
        slots, layer = self._slots, self._layers[number]
        if in_buffer:
            slots.own(number)
        if layer.place(slots, number, expert, in_buffer) >= 0 or (number, expert) in self._jobs:
            return None
        if in_buffer and self._copied(number, expert):
            return None
        taken = None if in_buffer else slots.take(number, kept)
        if taken is None:
            slots.own(number)
            return self._job(number, expert, None)
        slots.forget(number, taken[1])
        if layer.buffer is not None and slots.in_buffer(number, expert):
            _copy(layer.slots.parts(taken[0]), layer.buffer.parts(expert))
            slots.arrived(number, taken[0], expert)
            return None
        return self._job(number, expert, *taken)

    def _copied(self, number: int, expert: int) -> bool:
        """Where matrices are stacked: whether it has a slot, and has been copied from there to its buffer."""
        slots, layer = self._slots, self._layers[number]
        slot = int(slots.slot[number, expert])
        if layer.buffer is None or slot < 0:
            return False
        _copy(layer.buffer.parts(expert), layer.slots.parts(slot))
        slots.buffer[slots.buffer_of(number), expert] = 1
        return True

    def _put_right(self) -> None:
        """After an error: slots that were taken for experts that nobody is bringing are free."""
        self._slots.free_taken({(job.number, job.slot) for job in self._jobs.values()})

    # What it will, or is likely to, ask for

    def _look_ahead(self, call: int, readers: ThreadPoolExecutor) -> None:
        told = self._slots.told
        number = int(told[Told.LAYER]) + 1
        if told[Told.CALL] != call or number >= len(self._layers):
            return
        jobs = self._all_of(number, call) if told[Told.STREAM] == call else self._likely(number, call)
        self._begin(jobs, readers)

    def _all_of(self, number: int, call: int) -> list[_Job]:
        """A step that chooses most experts finds the next layer's in the buffer, as a layer that is streamed."""
        slots, buffer = self._slots, self._slots.buffer_of(number)
        if any(job.slot is None and slots.buffer_of(job.number) == buffer for job in self._jobs.values()):
            return []  # it is on its way, or somebody else still is
        before = int(slots.owner[buffer])
        if before != number:
            slots.owner[buffer] = AWAY
            if not self._still(call):
                slots.owner[buffer] = before
                return []
            slots.own(number)
        away = [one for one in range(slots.experts) if self._layers[number].place(slots, number, one, True) < 0]
        found = [one for one in away if (number, one) not in self._jobs and not self._copied(number, one)]
        return [self._job(number, expert, None) for expert in found]

    def _likely(self, number: int, call: int) -> list[_Job]:
        slots = self._slots
        likely = [int(one) for one in (slots.wish == call).nonzero()[0]]
        jobs: list[_Job] = []
        kept = frozenset(likely)
        for expert in likely:
            if slots.place(number, expert) >= 0 or (number, expert) in self._jobs:
                continue
            taken = slots.take(number, kept)
            if taken is None:
                break
            if not self._still(call):
                slots.give_back(number, *taken)
                break
            slots.forget(number, taken[1])
            slots.early[number, expert] = 1
            jobs.append(self._job(number, expert, *taken))
        return jobs

    def _still(self, call: int) -> bool:
        """Whether the step is where it was. What was written before this line is seen by whoever goes on."""
        fence()
        return int(self._slots.told[Told.CALL]) == call

    # Reading

    def _job(self, number: int, expert: int, slot: int | None, before: int = AWAY) -> _Job:
        packed = self._layers[number].buffer is None
        pieces = self._file.entries[self._entry(number, expert)].pieces if packed else 1
        return _Job(number, expert, slot, before, pieces)

    def _begin(self, jobs: Iterable[_Job], readers: ThreadPoolExecutor) -> None:
        for job in jobs:
            if not self._jobs:
                self._began = time.perf_counter()
            self._jobs[job.number, job.expert] = job
            for piece in sorted(job.left):
                try:
                    readers.submit(self._read, job, piece)
                except Exception as error:  # of a thread that cannot be started, perhaps
                    self._over(job, piece, f"experts cannot be read: {error!r}")

    def _wait(self, until: Callable[[], bool]) -> None:
        self.changed.wait_for(until)

    def _entry(self, number: int, expert: int) -> int:
        return number * self._slots.experts + expert

    def _read(self, job: _Job, piece: int) -> None:
        read, why = 0, None
        with self.changed:
            if piece not in job.left:
                return  # given up: what was to be filled may be somebody else's
            if job.dropped:
                job.skipped = True
            skip = job.skipped or job.why is not None
        if not skip:
            try:
                read = self._bring(job, piece)
            except StepFailed as error:
                why = str(error)
            except Exception as error:
                why = f"expert {job.expert} of layer {self._layers[job.number].index} cannot be read: {error!r}"
        with self.changed:
            self.nbytes += read
            self._over(job, piece, why)

    def _bring(self, job: _Job, piece: int) -> int:
        layer, entry = self._layers[job.number], self._entry(job.number, job.expert)
        if layer.buffer is None:
            place = self._slots.slots + job.expert if job.slot is None else job.slot
            return self._file.read(entry, piece, layer.memory[place])
        with self.changed:
            memory = self._scratch.pop()  # as many as there are readers
        try:
            into = layer.buffer.parts(job.expert) if job.slot is None else layer.slots.parts(job.slot)
            return _read_stacked(self._file, entry, memory, into)
        finally:
            with self.changed:
                self._scratch.append(memory)

    def _over(self, job: _Job, piece: int, why: str | None) -> None:
        job.why = job.why or why
        job.left.remove(piece)
        if not job.left:
            self._ended(job)

    def _ended(self, job: _Job) -> None:
        slots, is_there = self._slots, job.why is None and not job.skipped
        if job.slot is None:
            slots.buffer[slots.buffer_of(job.number), job.expert] = is_there
        elif is_there:
            slots.arrived(job.number, job.slot, job.expert)
        else:
            slots.failed(job.number, job.slot)
            slots.early[job.number, job.expert] = 0
        del self._jobs[job.number, job.expert]
        if not self._jobs:
            self.seconds += time.perf_counter() - self._began
        self.changed.notify_all()


def _stop(bell: int, thread: threading.Thread) -> None:
    os.close(bell)  # whoever reads finds the end
    if thread is not threading.current_thread():
        thread.join(timeout=10)
