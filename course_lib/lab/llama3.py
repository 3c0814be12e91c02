"""The best described failures of a large job, those of Llama 3 405B's pre-training, and the cluster that has them.

Source of all figures: A. Grattafiori et al., "The Llama 3 Herd of Models", 2024, arXiv:2407.21783. Section 3.3.1: nodes
of 8 GPUs, racks of 16 GPUs in two nodes behind one switch. Section 3.3.4 and table 5: 54 days of pre-training with 466
interruptions, 47 of them planned and 419 not; about 78 % of these 419 are confirmed or suspected hardware issues;
"higher than 90 %" effective training time, the time of useful training over the elapsed time. Table 4: 16,384 GPUs,
which we take for all of the 54 days, as the paper speaks of "16K GPU training" there.

Table 5 gives counts and percentages. The counts add up to 419 and are used here. The percentage of faulty GPUs, 30.1,
does not follow from its count (148 of 419 are 35.3 %), nor does the text's 58.7 % for all GPU issues, which is the sum
of such percentages (the counts give 64.0 %).

The paper does not say how long a snapshot, a recovery or a repair took, nor how often snapshots were made. So these are
arguments here.
"""

from typing import Any

from course_lib.lab.cluster import DAY_S, SimulatedCluster

DAYS = 54
GPUS, GPUS_PER_NODE, NODES_PER_RACK = 16_384, 8, 2
INTERRUPTIONS, PLANNED = 466, 47
EFFECTIVE_SHARE = 0.90  # and above

# Table 5: the unexpected interruptions by root cause.
CAUSES = {
    "faulty GPU": 148,
    "GPU HBM3 memory": 72,
    "software bug": 54,
    "network switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM memory": 19,
    "GPU system processor": 17,
    "network card": 7,
    "NCCL watchdog timeout": 7,
    "silent data corruption": 6,
    "GPU thermal interface and sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}
# What each cause takes from the job is our reading: a network cause the rack behind a switch, software the processes
# alone, all else a node. So 328 of 419 take a node, which is 78 %, as the paper's share of hardware issues.
RACK_CAUSES, PROCESS_CAUSES = ("network switch or cable",), ("software bug", "dependency")

UNEXPECTED = sum(CAUSES.values())
MTBF_S = DAYS * DAY_S / UNEXPECTED  # of the job: 3.09 hours
GPU_MTBF_S = MTBF_S * GPUS  # 5.8 years
NODE_MTBF_S = GPU_MTBF_S / GPUS_PER_NODE  # 264 days, counting whatever went wrong


def cluster(gpus: int = GPUS, **costs: Any) -> SimulatedCluster:
    """A cluster of so many GPUs that fail as often, each, as those of Llama 3 did.

    `costs` are SimulatedCluster's other arguments. With 16,384 GPUs it has 419 failures in 54 days on average.
    """
    racks = sum(CAUSES[cause] for cause in RACK_CAUSES)
    processes = sum(CAUSES[cause] for cause in PROCESS_CAUSES)
    nodes = UNEXPECTED - racks - processes
    node_seconds = GPUS // GPUS_PER_NODE * DAYS * DAY_S
    failing: dict[str, Any] = {
        "node_mtbf_s": node_seconds / nodes,
        "process_mtbf_s": node_seconds / processes,
        "rack_mtbf_s": node_seconds / NODES_PER_RACK / racks,
        "rack_nodes": NODES_PER_RACK,
    }
    return SimulatedCluster(nodes=-(-gpus // GPUS_PER_NODE), gpus_per_node=GPUS_PER_NODE, **failing, **costs)
