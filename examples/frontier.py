"""Print the trade-off between memory and time, and explain one of its plans.

python examples/frontier.py [FILE.html]

With a file name, a page with the trade-off is written. Planning needs a profile alone: no model, no device, no PyTorch.
Here the profile is a textbook chain of 12 equal stages. `ckptplan.profile` makes one from a model, and `profile.save`
and `Profile.load` carry it from one machine to another.
"""

import sys

import ckptplan

MIB = 2**20

profile = ckptplan.Profile.from_chain(
    forward_s=[0.010] * 12,
    backward_s=[0.020] * 12,
    output_bytes=[16 * MIB] * 12,
    saved_bytes=[64 * MIB] * 12,  # the output included
    input_bytes=16 * MIB,
    out_bytes_per_s=2e9,  # bandwidth from the device to the host
    in_bytes_per_s=2e9,
)

plans = ckptplan.frontier(profile, points=6, time_limit_s=12)
print("  peak MiB   step ms   slower by   proven gap")
for plan in plans:
    print(f"{plan.peak_bytes / MIB:10.0f}{plan.step_s * 1e3:10.1f}{plan.overhead:12.1%}{plan.gap:13.2%}")

middle = plans[len(plans) // 2]
print()
print(ckptplan.explain(profile, middle, time_limit_s=5))

if len(sys.argv) > 1:
    middle.report(profile, frontier=plans).save(sys.argv[1])
    print(f"written to {sys.argv[1]}")
