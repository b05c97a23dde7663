"""A client of Decide and Report in plain generated Python: `example_client.py unix:/path`."""

import sys
import time

import grpc

from parlay.v1 import policy_pb2 as pb
from parlay.v1 import policy_pb2_grpc

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: example_client.py ADDRESS (of parlay serve: unix:/path or host:port)")
    # Two requests whose n-grams match by 4 and 9 tokens; another run: step ids begin again.
    hello = pb.Hello(protocol_version=1, engine_id="example", k_max=8, token_budget=512)
    hello.proposers.append(pb.PROPOSER_NGRAM)
    hello.run_id = time.time_ns()
    view = pb.BatchView(
        rows=2, step_id=0, running=2, free_blocks=90, total_blocks=128, kv_tokens=500,
        request_id=[1, 2], task=[0, 0], context_tokens=[200, 300], output_tokens=[20, 30],
        prefill_tokens=[0, 0], temperature=[0, 0], max_k=[8, 8], proposer_mask=[0b10, 0b10],
        tpot_target_ms=[float("nan")] * 2, recent_accept=[1, 1], match_tokens=[4, 9],
        draft_kv_lag=[0, 0], seeded=[False, False],
    )  # fmt: skip
    channel = grpc.insecure_channel(sys.argv[1])
    sidecar = policy_pb2_grpc.PolicyServiceStub(channel)  # type: ignore[no-untyped-call]
    try:
        plan = sidecar.Decide(pb.DecideRequest(hello=hello, view=view), timeout=5).plan
    except grpc.RpcError as error:
        sys.exit(f"no plan from {sys.argv[1]}: {error.code().name} {error.details()}")
    print(f"proposers {list(plan.proposer)}, tokens to draft {list(plan.k)}")
    outcome = pb.StepOutcome(  # as if all drafts were accepted
        rows=2, step_id=0, padded_tokens=2 + sum(plan.k), kv_tokens=500, verify_ms=20,
        step_ms=21, draft_ms=[0, 0, 0, 0], request_id=[1, 2], task=[0, 0], truncated_by=[0, 0],
        proposer=plan.proposer, requested_k=plan.k, drafted_k=plan.k, verified_k=plan.k,
        accepted=plan.k, emitted=[k + 1 for k in plan.k], match_tokens=[4, 9],
        plan_source=[pb.PLAN_SOURCE_REMOTE] * 2, plan_step_id=[0, 0],
    )  # fmt: skip
    report = pb.ReportRequest(engine_id=hello.engine_id, outcome=outcome)
    print("counted" if sidecar.Report(report, timeout=5).counted else "ignored")
