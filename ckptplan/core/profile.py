"""Profile: everything measured about one training step, as plain data with a documented JSON form."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptplan.core.checks import MOST_BYTES, check_bytes, check_fields, check_number
from ckptplan.core.errors import InvalidInputError, PlanMismatchError
from ckptplan.core.files import Saved
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.resident import ACTIVATIONS, Kind, Resident, check_between, offloading
from ckptplan.core.stage import Differentiated, Stage
from ckptplan.core.storage import Storage
from ckptplan.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Model, inputs, device and versions that a profile, and every plan made from it, is bound to.

    `apply` refuses a plan whose fingerprint differs from the model's, with an error that names the field. It compares
    neither `optimizer` nor `compiled`. Instead of `inputs`, `accumulates` and `autocast`, the tensors, gradients and
    autocast of a step are compared when it runs. A profile written by hand has empty texts and `training=True`; its
    plans can be simulated, not applied.

    Parameters
    ----------
    model : str
        The model's class with its module, and the names of modules in it that are compiled.
    parameters : str
        Number of elements, and a digest of the parameters' names, shapes, types and `requires_grad`.
    training : bool
        Whether the model is in training mode.
    inputs : str
        The step's input tensors; "step()" if the step is a function of its own.
    device : str
        Name of the device.
    torch_version : str
        Version of PyTorch.
    accumulates : bool
        Whether the step starts with a gradient for each parameter that requires one.
    optimizer : str
        Class of the optimizer whose state and update count; empty: none.
    parallel : str
        For a model on several devices: "ddp", with ", gradients in buckets" and ", outputs copied" where they are, for
        `DistributedDataParallel`; "fsdp, 8 ranks, units ..." for a sharded model. Empty: one device.
    autocast : str
        "bfloat16", "float16" or "off" around the forward; empty: not known.
    compiled : tuple of str
        Modules that `apply` compiles, if they aren't compiled, for as long as the plan is applied.
    """

    model: str
    parameters: str
    training: bool
    inputs: str
    device: str
    torch_version: str
    accumulates: bool = False
    optimizer: str = ""
    parallel: str = ""
    autocast: str = ""
    compiled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields("fingerprint", self)

    def require(self, found: Fingerprint, *, ignore: tuple[str, ...] = ()) -> None:
        """Raise unless `found` agrees in every field not in `ignore`.

        Raises
        ------
        PlanMismatchError
            Names the first field that differs, with both values.
        """
        for field in dataclasses.fields(self):
            want, have = getattr(self, field.name), getattr(found, field.name)
            if field.name not in (*ignore, "optimizer", "autocast", "compiled") and want != have:
                raise PlanMismatchError(f"{self._difference(field.name, want, have)}; solve again for this model")

    @staticmethod
    def _difference(name: str, want: object, have: object) -> str:
        if name == "parameters":
            want, have = (str(text).partition(" in ")[0] for text in (want, have))
            if want == have:
                return (
                    f"the plan was made for {want} parameters with other names, shapes, types or requires_grad than "
                    "here: a layer was frozen, added or converted since"
                )
            return f"the plan was made for {want} parameters, this model has {have}"
        if name == "training":
            want, have = ("training mode" if value else "evaluation mode" for value in (want, have))
            return f"the plan was made in {want}, the model is in {have}; call model.train() before solve and apply"
        if name == "parallel":
            want, have = (f"in {value!r}" if value else "for one device alone" for value in (want, have))
            return f"the plan was made for a model {want}, this one is {have}, and a rank holds other bytes"
        return f"the plan was made for {name.replace('_', ' ')} = {want!r}, this is {have!r}"


MOST_ERROR = 1.0
"""Largest `step_error`: measurements spread wider than that say nothing."""

COLLECTIVES = "collectives of"
"""Begins the note of a profile in whose times collectives are."""

NO_MODEL = Fingerprint("", "", True, "", "", "")
"""Fingerprint of a profile written by hand: such plans can be simulated, not applied."""


@dataclass(frozen=True, slots=True)
class _ChainStage:
    """A stage of the textbook chain (`Profile.from_chain`), which makes the storages 2 * number and 2 * number + 1."""

    number: int
    before_bytes: int
    forward_s: float
    backward_s: float
    output_bytes: int
    saved_bytes: int
    forward_temp_bytes: int
    backward_temp_bytes: int

    def __post_init__(self) -> None:
        check_fields(f"stage {self.name!r}", self)
        if self.saved_bytes < self.output_bytes:
            raise InvalidInputError(
                f"stage {self.name!r}: saved_bytes={self.saved_bytes} is below its output, {self.output_bytes} bytes"
            )

    @property
    def name(self) -> str:
        return f"s{self.number}"

    def storages(self, stages: int) -> tuple[Storage, Storage]:
        """Return what the stage saves besides its output, and the output, in a chain of so many stages."""
        i = self.number
        inner = Storage(f"{self.name}.inner", self.saved_bytes - self.output_bytes, i, i)
        return inner, Storage(f"{self.name}.out", self.output_bytes, i, min(i + 1, stages - 1))

    def stage(self) -> Stage:
        """Return the stage, with options that keep, swap and recompute."""
        own = 2 * self.number
        inputs = (own - 1,) if self.number else ()
        saved = (*inputs, own, own + 1)
        backward_bytes = self.before_bytes + self.backward_temp_bytes
        keep = Option("keep", saved, (), self.saved_bytes + self.forward_temp_bytes, backward_bytes)
        recompute = Option(
            "recompute",
            inputs,
            (),
            self.output_bytes + self.forward_temp_bytes,
            self.saved_bytes + max(self.forward_temp_bytes, backward_bytes),
            recompute_s=self.forward_s,
            recomputes=True,
        )
        menu = [keep, replace(keep, name="swap", moves=tuple(range(len(saved)))), recompute]
        if inputs:
            menu.append(replace(recompute, name="recompute+swap", moves=(0,)))
        return Stage(self.name, self.name, tuple(menu), self.forward_s, self.backward_s, linked=inputs)


@dataclass(frozen=True, slots=True, repr=False)
class Profile(Saved):
    """The chain of one training step of one model, with measured bytes and times.

    The stages run forward 0, 1, ..., L-1, then backward L-1, ..., 1, 0, and then the optimizer updates. The rules of
    NOTE [Residency] in rules.py give the bytes of each of these steps.

    Parameters
    ----------
    stages : tuple of Stage
        In forward order, at least one, with unique names.
    storages : tuple of Storage
        Memory blocks that outlive the stage that made them. Stages name them by their index.
    base_forward_bytes, base_backward_bytes : tuple of int
        Per stage, the bytes live at the start of its forward and backward that no storage in `storages` accounts for:
        parameters, buffers, optimizer state, inputs, gradients so far, gradients in flight.
    update_peak_bytes : int
        Peak after the last backward: the gradients with the optimizer's update.
    link : Link
        Connection to the host tier.
    resident_bytes : int
        Bytes before the step: parameters, buffers, gradients, optimizer state, inputs. Part of every base.
    fingerprint : Fingerprint
        What the profile was measured on.
    notes : tuple of str
        What a reader must know about the measurement.
    disk : Link or None
        Connection to the disk tier behind the host, in no field faster than `link`; None: there is none.
    outside : tuple of str or None
        Modules that the step calls and that lie in no stage's module; None: not known.
    uncalled : tuple of str
        Modules inside stages that the step doesn't call, the topmost of each path.
    differentiated : tuple of Differentiated
        Stages through which forward itself runs a backward (`torch.autograd.grad` for a penalty, forces, an inner
        loop). They are kept.
    foreign : tuple of str or None
        Classes of the modules that the step calls and whose parameters aren't the model's, as in its loss; None: not
        known.
    step_error : float
        Standard error of `baseline_step_s`, as a share of it, 0 to 1; 0 if the times are given, not measured.
    residents : tuple of Resident
        Parameters, buffers, gradients and optimizer state that may leave the device during the step, if `offload` has
        their kind.
    offload : tuple of str
        Kinds of storages that options move: "activations", "weights", "optimizer", "gradients". The residents of these
        kinds are the last `storages`, in the same order, and every option of their users saves them.
    between : int
        How many of three equal parts of the frozen weights are away between steps too.
    """

    SCHEMA = "ckptplan.profile/3"

    stages: tuple[Stage, ...]
    storages: tuple[Storage, ...]
    base_forward_bytes: tuple[int, ...]
    base_backward_bytes: tuple[int, ...]
    update_peak_bytes: int
    link: Link
    resident_bytes: int = 0
    fingerprint: Fingerprint = NO_MODEL
    notes: tuple[str, ...] = ()
    disk: Link | None = None
    outside: tuple[str, ...] | None = None
    uncalled: tuple[str, ...] = ()
    differentiated: tuple[Differentiated, ...] = ()
    foreign: tuple[str, ...] | None = None
    step_error: float = 0.0
    residents: tuple[Resident, ...] = ()
    offload: tuple[Kind, ...] = ACTIVATIONS
    between: int = 0

    @staticmethod
    def upgraded(data: dict[str, Any]) -> dict[str, Any]:
        """The fields in JSON from those of files that name the bytes of the inputs, on which nothing depends."""
        data.pop("input_bytes", None)
        return data

    def __post_init__(self) -> None:
        check_fields("profile", self)
        check_number("profile", 0, MOST_ERROR, step_error=self.step_error)
        check_between(self.between)
        if self.disk is not None and self.disk != self.disk.behind(self.link):
            raise InvalidInputError(
                f"profile: {self.disk} is the way to the disk and faster than {self.link}, through which its "
                "transfers pass; give the slower of both (disk.behind(link))"
            )
        n = len(self.stages)
        if n == 0:
            raise InvalidInputError("the profile has no stages; a chain needs at least one")
        if len(self.base_forward_bytes) != n or len(self.base_backward_bytes) != n:
            raise InvalidInputError(
                f"base bytes are given for {len(self.base_forward_bytes)} forward and {len(self.base_backward_bytes)} "
                f"backward steps; the chain has {n} stages"
            )
        names = [stage.name for stage in self.stages]
        if len(set(names)) != n:
            raise InvalidInputError(f"stage name {next(x for x in names if names.count(x) > 1)!r} is used twice")
        for storage in self.storages:
            if storage.born >= n:
                raise InvalidInputError(
                    f"storage {storage.name!r} is made in forward step {storage.born}; the last one is {n - 1}"
                )
        most = max(*self.base_forward_bytes, *self.base_backward_bytes) + sum(s.nbytes for s in self.storages)
        if most >= MOST_BYTES:
            raise InvalidInputError(f"the step's base and storages have {most} bytes in all; must be below 2**60")
        for resident in self.residents:
            if any(i >= n or self.stages[i].is_glue for i in resident.users):
                raise InvalidInputError(f"resident {resident.names[0]!r}: users={resident.users} aren't module stages")
        saving: dict[int, int] = {}
        for i, stage in enumerate(self.stages):
            for option in stage.options:
                self._check_held(i, option)
                for s in option.held:
                    if self.storages[s].graph_until is not None and saving.setdefault(s, i) != i:
                        raise InvalidInputError(
                            f"stage {stage.name!r} holds storage {self.storages[s].name!r}, which stage "
                            f"{self.stages[saving[s]].name!r} holds, too; with a graph_until it may have one holder"
                        )
            for s in stage.linked:
                maker = self.storages[s].born
                if not 0 <= maker < i or self.stages[maker].is_glue:
                    raise InvalidInputError(
                        f"stage {stage.name!r} is linked to storage {self.storages[s].name!r}, which no earlier module "
                        f"stage makes (born={maker})"
                    )

    def _check_held(self, i: int, option: Option) -> None:
        owner = f"stage {self.stages[i].name!r}, option {option.name!r}"
        for s in option.held:
            if s >= len(self.storages):
                raise InvalidInputError(f"{owner} names storage {s!r}; there are {len(self.storages)}")
            storage = self.storages[s]
            if storage.born > i:
                raise InvalidInputError(
                    f"{owner} (step {i}) holds storage {storage.name!r}, made only in step {storage.born}"
                )
            if option.name == "recompute" and storage.born == i and s in self.stages[i].keep.saved:
                raise InvalidInputError(f"{owner} has the stage's own product {storage.name!r} as an input")

    def offloading(self, offload: Sequence[Kind], between: int = 0) -> Profile:
        """Return the profile whose options move these kinds of storages (`resident.offloading`)."""
        return offloading(self, offload, between)

    @property
    def moving(self) -> tuple[Resident, ...]:
        """The residents that are storages, the last ones, and that options move."""
        return tuple(resident for resident in self.residents if resident.kind in self.offload)

    @property
    def first_moving(self) -> int:
        """The index of the first storage of `moving`; those before are what stages make or save."""
        return len(self.storages) - len(self.moving)

    @property
    def baseline_step_s(self) -> float:
        """Time of the step with everything kept: the longer of compute and launching."""
        return max(self.fastest_compute_s + sum(stage.keep.overhead_s for stage in self.stages), self.baseline_launch_s)

    @property
    def fastest_step_s(self) -> float:
        """No plan's step is shorter: that with everything kept, unless compiled code that saves less is faster."""
        return max(self.fastest_compute_s, self.baseline_launch_s)

    @property
    def fastest_compute_s(self) -> float:
        """Compute time of that step."""
        return sum(stage.forward_s - stage.forward_wait_s + stage.backward_s for stage in self.stages)

    @property
    def baseline_launch_s(self) -> float:
        """Time in which the host launches that step; 0 where it is no lane of its own."""
        return sum(stage.forward_launch_s + stage.backward_launch_s for stage in self.stages)

    def error_s(self, step_s: float, host_bytes: int, disk_bytes: int) -> float:
        """Return the error of the seconds of what a plan does besides keeping everything: what it adds, and its copies.

        The rest of the step is the same under all plans, so its error is no error of their difference. What is added is
        taken to have the relative error of the step; a recompute's, whose time is the difference of two measured ones,
        is larger. Example: a step of 100 ms with an error of 2 % becomes 110 ms by recompute and waits, and copies take
        20 ms each way: 2 % of 10 + 2 * 20 = 50 ms are 1 ms.

        Parameters
        ----------
        step_s : float
            The plan's step.
        host_bytes, disk_bytes : int
            Bytes that it moves to each tier.
        """
        copies_s = 0.0
        for link, nbytes in ((self.link, host_bytes), (self.disk, disk_bytes)):
            if link is not None:
                copies_s += nbytes / link.out_bytes_per_s + nbytes / link.in_bytes_per_s
        return self.step_error * min(step_s - self.fastest_step_s + copies_s, step_s)

    def __repr__(self) -> str:
        made_for = f" of {self.fingerprint.model}" if self.fingerprint.model else ""
        return (
            f"<Profile{made_for}: {len(self.stages)} stages, {len(self.storages)} storages, "
            f"{format_seconds(self.baseline_step_s)} a step>"
        )

    def __str__(self) -> str:
        error = f" ± {self.step_error:.1%}" if self.step_error else ""
        link = self.link
        lines = [
            f"profile of {len(self.stages)} stages and {len(self.storages)} storages",
            f"step    {format_seconds(self.baseline_step_s)}{error} with everything kept",
            f"link    {format_bytes(link.out_bytes_per_s)}/s out, {format_bytes(link.in_bytes_per_s)}/s in",
        ]
        return "\n".join([*lines, *(f"note    {note}" for note in self.notes)])

    def graph(self) -> nx.DiGraph:
        """Return the graph of stages and storages, over all options: who makes a storage, and who needs it later.

        It is bipartite and acyclic: edges point from a stage to the storages that it makes, and from a storage to
        later stages. A skip connection is an edge with `passes > 0`, a branch a storage with several edges, and calls
        of a shared block are stages with the same `module`.

        Returns
        -------
        networkx.DiGraph
            Nodes, in the order of `stages` and `storages`:

            - `("stage", i)`: `name`, `module` (the name without `#k`), `kind`, `is_glue`, `forward_s`, `backward_s`;
              `bipartite` is 0.
            - `("storage", s)`: the fields of `Storage` (`name`, `nbytes`, `born`, ...); `bipartite` is 1.

            Edges:

            - stage to storage, where the stage makes it; a storage with `born == -1` has no such edge. `held_by`: names
              of the stage's options that hold it until the stage's own backward.
            - storage to stage, where an option of a later stage holds it, or the program does until then. `held_by` as
              above; `linked`: whether it is, unmodified, an input of the stage and a stage's output; `program`: whether
              this is the last stage at whose start the program's variables hold it; `passes`: how many stages in
              between, glue left out, have no edge from it.
        """
        from ckptplan.core.graph import graph_of  # loads networkx, which most calls don't need

        return graph_of(self)

    @classmethod
    def from_chain(
        cls,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        output_bytes: Sequence[int],
        saved_bytes: Sequence[int],
        *,
        input_bytes: int,
        forward_temp_bytes: Sequence[int] | None = None,
        backward_temp_bytes: Sequence[int] | None = None,
        out_bytes_per_s: float = 1e10,
        in_bytes_per_s: float = 1e10,
        disk_out_bytes_per_s: float | None = None,
        disk_in_bytes_per_s: float | None = None,
    ) -> Profile:
        """The textbook chain of Beaumont et al. (2019): stage i maps output i-1 to output i.

        Stage i saves `saved_bytes[i]`, its output included, and needs output i-1 for its backward. While it runs
        backward its saved set, the gradients of its output and of its input and its temporaries are all present; the
        chain's input is always held. Recompute takes `forward_s`.

        Parameters
        ----------
        forward_s, backward_s : sequence of float
            Seconds per stage.
        output_bytes, saved_bytes, forward_temp_bytes, backward_temp_bytes : sequence of int
            Bytes per stage; `saved_bytes[i] >= output_bytes[i]`. Temporaries default to 0.
        input_bytes : int
            Bytes of the chain's input.
        out_bytes_per_s, in_bytes_per_s : float
            Link bandwidth.
        disk_out_bytes_per_s, disk_in_bytes_per_s : float, optional
            Bandwidth to and from a disk tier behind the host, both or neither.

        Raises
        ------
        InvalidInputError
            On lengths that differ, saved sets smaller than the output, or values that aren't finite and 0 or more.
        """
        if (disk_out_bytes_per_s is None) != (disk_in_bytes_per_s is None):
            raise InvalidInputError(
                f"chain: disk_out_bytes_per_s={disk_out_bytes_per_s}, disk_in_bytes_per_s={disk_in_bytes_per_s}; a "
                "disk tier needs both"
            )
        disk = None
        if disk_out_bytes_per_s is not None and disk_in_bytes_per_s is not None:
            disk = Link(disk_out_bytes_per_s, disk_in_bytes_per_s)
        n = len(forward_s)
        given = (forward_s, backward_s, output_bytes, saved_bytes, forward_temp_bytes, backward_temp_bytes)
        lists = [[0] * n if values is None else list(values) for values in given]
        lengths = {len(values) for values in lists}
        if len(lengths) != 1 or n == 0:
            raise InvalidInputError(f"every list of a chain needs one entry per stage; got lengths {sorted(lengths)}")
        check_bytes("chain", input_bytes=input_bytes)
        before_bytes = [input_bytes, *output_bytes[:-1]]
        chain = [_ChainStage(i, *values) for i, values in enumerate(zip(before_bytes, *lists, strict=True))]
        return cls(
            stages=tuple(link.stage() for link in chain),
            storages=tuple(storage for link in chain for storage in link.storages(n)),
            base_forward_bytes=(input_bytes,) * n,
            base_backward_bytes=tuple(input_bytes + output_bytes[i] for i in range(n)),
            update_peak_bytes=input_bytes,
            link=Link(out_bytes_per_s, in_bytes_per_s),
            resident_bytes=input_bytes,
            disk=disk,
        )
