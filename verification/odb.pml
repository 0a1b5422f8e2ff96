/*
 * The protocol that aligns the steps of N replicas, for SPIN; docs/dgap.md explains it.
 *
 * Per replica a planner (two exchanges per step or three, ahead of the trainer) and a trainer (takes a
 * planned step from a queue, then meets the other trainers in the step's device collective).
 * Here: state, processes, faults. rules.pml: what a planner decides. world.pml: the worlds that are
 * tried and what must hold at the end.
 *
 * Time is left open: each process may be slow, and a deadline runs out only when a peer is gone or
 * hangs. What the policy selects is left open too: any selection that keeps the progress rule.
 *
 * Macros, set by run.py:
 *   N          replicas, 2 or 3
 *   AHEAD      plan_ahead
 *   DRAW       FIXED: shards | ONLINE: assigned online | BATCH: the policy `samples` |
 *              QUOTA: endless shards, a given number of samples
 *   RULE       EACH replica that holds samples emits one | SOME replica does
 *   DRAIN      defined: a deadline ends the drain, as in odb_megatron/plan/termination.py
 *   FAULT      see below
 *   STOPS      defined: besides, any replicas may ask to stop, at any moment
 *   MOST       largest shard (FIXED)
 *   LEAST      fewest samples of all replicas (draws other than FIXED)
 *   TOTAL      most samples of all replicas
 *   WINDOW     largest window
 *   FIT        samples that fit a micro-batch
 *   MULTIPLE   the micro-batch count is a multiple of this
 *   HOLES      defined: any drawn position may turn out to emit nothing (FIXED)
 *   THIRD      defined: any step that emits may have a third exchange, of sample lists
 *   PUT_AFTER  defined: back-pressure after a step is planned instead of before
 *   REPLAY     defined: one given world and its selections (tests/test_verification.py)
 *   MUTATE_*   defined: one rule is broken, to see that the check notices
 *   OCCURS     a case that is claimed not to happen, to see that it does
 */

#define FIXED 0
#define ONLINE 1
#define BATCH 2
#define QUOTA 3

#define EACH 0
#define SOME 1

#define NONE 0
#define LEAVE 1 /* all trainers leave after the same step, unknown to the planners, and close() */
#define ERROR 2 /* one planner meets an error while it builds a record */
#define HANG 3  /* one planner never finishes building a record */
#define CRASH 4 /* the process of one replica dies, at any moment */
#define RAISE 5 /* the trainer of one replica raises, at any moment, and close()s */

#ifndef N
#define N 2
#endif
#ifndef AHEAD
#define AHEAD 2
#endif
#ifndef DRAW
#define DRAW FIXED
#endif
#ifndef RULE
#define RULE EACH
#endif
#ifndef FAULT
#define FAULT NONE
#endif
#ifndef MOST
#define MOST 2
#endif
#ifndef TOTAL
#define TOTAL (N * MOST)
#endif
#ifndef LEAST
#define LEAST 0
#endif
#ifndef WINDOW
#define WINDOW 2
#endif
#ifndef FIT
#define FIT 1
#endif
#ifndef MULTIPLE
#define MULTIPLE 1
#endif

#define SAMPLES short /* a set of at most 12 samples, one bit each */

mtype = { planning, finished, stopped, failed };

/* ---- the world, chosen by init ---- */
byte window;      /* most samples a replica holds */
byte total;       /* samples of the run */
byte batch;       /* BATCH, DRAIN: samples per step */
byte leave_after; /* LEAVE: steps that are trained */
byte victim;      /* ERROR, HANG, CRASH, RAISE: which replica */
short max_steps;  /* the stated bound */
short max_drain;  /* the same, from the first drained replica on; 0: none is drained yet */

/* ---- a replica's own state ---- */
byte next[N];     /* FIXED: first sample not drawn; other draws: its copy of the consumed count */
byte last[N];     /* FIXED: end of its shard */
SAMPLES held[N];  /* its window */
byte committed[N]; /* steps planned */
byte last_step[N]; /* DRAIN: steps in all, fixed when the first replica is drained; 0: not yet */
mtype result[N] = planning;

/* ---- what it sends: window record, plan record ---- */
byte entered[N];  /* exchanges entered */
byte w_held[N];
byte w_undrawn[N];
bit w_closing[N];
bit w_failed[N];
byte p_need[N];   /* micro-batches its selection needs */
byte p_samples[N];
byte p_remaining[N]; /* not emitted after this step */
bit p_closing[N];
bit p_failed[N];
#ifdef THIRD
byte third;       /* of this step, equal for all: UNDECIDED | NO_THIRD | HAS_THIRD */
bit listed[N];    /* has entered this step's third exchange */
bit l_failed[N];
#endif

/* ---- between planner and trainer ---- */
chan steps[N] = [AHEAD] of { byte, bit }; /* M, whether it is the final step */
bit asked[N];     /* stop asked: train on up to the common last step */
bit closed[N];    /* close() called: no further step is taken */

/* ---- trainers and processes ---- */
byte in_step[N];  /* steps entered: the device collective of step k waits for all */
byte trained[N];
bit ended[N];     /* the trainer has returned */
bit gone[N];      /* the process is dead */
bit struck;       /* ERROR, HANG, RAISE: it has happened */
bit done;

/* ---- for assertions ---- */
SAMPLES emitted;
SAMPLES left_out;
byte num_emitted; /* QUOTA */
byte planned_m[N];
byte trained_m[N];
byte asked_at[N];
byte closing_at = 255; /* exchange that was the first to carry a closing bit */

hidden byte num, rest, cursor, at, each, common;

#ifdef OCCURS
#define NEVER(case, condition) assert(OCCURS != case || !(condition))
#else
#define NEVER(case, condition) skip
#endif
#define IDLE_MICRO_BATCH 1
#define DRAINED_EARLY 2
#define FULL_WHEN_CLOSED 3
#define CLOSING_IN_PLAN_RECORD 4
#define PEERS_DEADLINE 5
#define WATCHDOG_NEEDED 6
#define LATEST_STOP 7
#define LATEST_END 8
#define ALL_IDLE_STEP 9
#define EMPTY_LIST 10
#define FAILED_LIST 11
#define ASKED_IN_THIRD 12

#define BIT(x) (1 << (x))
#define HAS(x, k) (((x) >> (k)) & 1)
#define SIZE4(x, k) (HAS(x, k) + HAS(x, k + 1) + HAS(x, k + 2) + HAS(x, k + 3))
#define SIZE(x) (SIZE4(x, 0) + SIZE4(x, 4) + SIZE4(x, 8))
#define MAX2(x, y) ((x) > (y) -> (x) : (y))
#define MIN2(x, y) ((x) < (y) -> (x) : (y))
#define CEIL(x, y) (((x) + (y) - 1) / (y))

/* Over replicas 0, 1 and N-1: with two replicas the last two are one. */
#define ANY(x) (x[0] || x[1] || x[N-1])
#define SUM(x) (x[0] + x[1] + (N - 2) * x[N-1])
#define MAX(x) MAX2(x[0], MAX2(x[1], x[N-1]))
#define MIN(x) MIN2(x[0], MIN2(x[1], x[N-1]))
#define EQUAL(x) (x[0] == x[1] && x[0] == x[N-1])
#define NONE_BEHIND(x, r) (x[0] >= x[r] && x[1] >= x[r] && x[N-1] >= x[r])

/* All have entered the exchange that r waits in; they are never more than one apart. */
#define MET(r) NONE_BEHIND(entered, r)

#define UNDECIDED 0
#define NO_THIRD 1
#define HAS_THIRD 2
#define ALL_LISTED (listed[0] && listed[1] && listed[N-1])

/* An exchange with a dead process may complete or not: gloo promises neither. With a process that
   lives and does not answer, the deadline runs while the own trainer waits for a step. */
#define WAITS(r) (empty(steps[r]) && in_step[r] == trained[r] && !closed[r] && !ended[r])
#ifdef MUTATE_NO_DEADLINE
#define DEADLINE(r, is_met) false
#else
#define DEADLINE(r, is_met) (ANY(gone) || (FAULT == HANG && struck && !(is_met) && WAITS(r)))
#endif

/* The watchdog ends a process whose trainer waits in a collective for a trainer that has left. */
#define ABSENT(j, r) ((gone[j] || ended[j]) && in_step[j] < in_step[r])
#ifdef MUTATE_NO_WATCHDOG
#define WATCHDOG(r) false
#else
#define WATCHDOG(r) (ABSENT(0, r) || ABSENT(1, r) || ABSENT(N-1, r))
#endif

#ifdef MUTATE_NOT_WOKEN
#define WOKEN(r) false
#else
#define WOKEN(r) closed[r]
#endif

#define CLOSING(r) (asked[r] || closed[r])

#include "rules.pml"
#include "world.pml"

/* Each wait is one blocking statement; what follows it touches only what the replica itself
   writes, and what its peers do not write before it enters its next exchange. So atomic blocks
   hide no interleaving that matters. */
proctype planner(byte r) {
    SAMPLES chosen;
    byte put_m;
    bit is_final;
again:
    {
        atomic {
#ifndef PUT_AFTER
            nfull(steps[r]) || WOKEN(r);
#endif
            if
            :: full(steps[r]) -> NEVER(FULL_WHEN_CLOSED, true)
            :: nfull(steps[r])
            fi;
            enter_window_exchange(r)
        };
        atomic {
            leave_unless_met(r, MET(r), ANY(w_failed), ANY(w_closing));
            forget(p_need[r], p_samples[r], p_remaining[r]);
#ifdef THIRD
            listed[r] = 0; third = UNDECIDED;
#endif
            assert(ANY_LEFT); /* no step is planned past the final one */
            select_samples(r);
            enter_plan_exchange(r)
        };
        atomic {
#ifdef MUTATE_PLAN_BIT_UNSEEN
            leave_unless_met(r, MET(r), ANY(p_failed), p_closing[r]);
#else
            leave_unless_met(r, MET(r), ANY(p_failed), ANY(p_closing));
#endif
#ifdef THIRD
            decide_third(r);
            if
            :: IN_THIRD(r) -> enter_third_exchange(r)
            :: else
            fi
        };
        atomic {
            if
            :: !IN_THIRD(r)
            :: IN_THIRD(r) && (ALL_LISTED || DEADLINE(r, ALL_LISTED)) ->
                leave_unless_met(r, ALL_LISTED, ANY(l_failed), false)
            fi;
#endif
            common_count(r);
            commit(r);
            forget(w_held[r], w_undrawn[r], chosen);
#ifdef PUT_AFTER
            put_m = common; is_final = (rest == 0)
        };
        atomic {
            nfull(steps[r]) || WOKEN(r);
#else
            put_m = common; is_final = (rest == 0);
#endif
            if
            :: full(steps[r]) -> assert(closed[r]) /* nobody takes this step */
#ifdef MUTATE_NO_IDLE_STEP
            :: nfull(steps[r]) && p_samples[r] == 0 -> skip
#endif
            :: nfull(steps[r]) -> steps[r]!put_m,is_final
            fi;
            put_m = 0;
#ifdef MUTATE_PLAN_PAST_FINAL
            is_final = 0;
#endif
            if
            :: is_final -> result[r] = finished
            :: else -> goto again
            fi
        }
    } unless { gone[r] };
out:
    skip
}

#define END_TRAINER(r) ended[r] = 1; goto out
#define LEAVE_TRAINER(r) closed[r] = 1; goto close

proctype trainer(byte r) {
    byte m;
    bit is_final;
take:
    {
        atomic {
            if
            :: FAULT == LEAVE && trained[r] == leave_after -> LEAVE_TRAINER(r)
            :: FAULT == RAISE && r == victim && struck -> LEAVE_TRAINER(r)
            :: FAULT == RAISE && r == victim && struck && nempty(steps[r]) ->
                steps[r]?m,is_final; m = 0; is_final = 0;
                goto forward_raises
#ifdef MUTATE_STOP_AT_ONCE
            :: asked[r] -> LEAVE_TRAINER(r)
#endif
            :: nempty(steps[r]) && !(FAULT == LEAVE && trained[r] == leave_after) ->
                steps[r]?m,is_final;
                enter_step(r)
            :: empty(steps[r]) && result[r] != planning -> END_TRAINER(r)
            :: FAULT == HANG && r == victim && struck && WAITS(r) && result[r] == planning ->
                result[r] = failed; /* its own deadline */
                END_TRAINER(r)
            fi
        };
        atomic {
            if
            :: NONE_BEHIND(in_step, r) -> leave_step(r)
            :: WATCHDOG(r) -> NEVER(WATCHDOG_NEEDED, true);
                result[r] = failed; gone[r] = 1; goto out
            fi;
            if
            :: is_final -> END_TRAINER(r)
            :: else -> goto take
            fi
        };
forward_raises:
        atomic { LEAVE_TRAINER(r) };
close:
        atomic { /* the planner was woken: wait for its last exchange */
            if
            :: result[r] != planning
#ifndef MUTATE_CLOSE_WAITS_FOREVER
            :: FAULT == RAISE -> gone[r] = 1 /* the deadline of close(): at any moment */
#endif
            fi;
            END_TRAINER(r)
        }
    } unless { gone[r] };
out:
    skip
}

#define ASK(r) atomic { !asked[r] && !ended[r] -> asked[r] = 1; asked_at[r] = trained[r] }

/* Chooses when something happens from outside: at any moment, or never. */
proctype outside() {
#ifdef STOPS
    do
    :: ASK(0)
    :: ASK(1)
#if N == 3
    :: ASK(2)
#endif
    :: break
    od;
#endif
    if
    :: FAULT == CRASH -> gone[victim] = 1
    :: FAULT == RAISE -> struck = 1
    :: true
    fi
}

/* Trainer and planner of r, or all of its process. */
#define RETURNED(r) (gone[r] || (ended[r] && (result[r] != planning || (struck && r == victim))))

init {
    atomic {
        choose_world();
        /* Without samples there is no step, and all know it. */
        if
        :: total == 0 ->
            result[0] = finished; result[1] = finished; result[N-1] = finished
        :: else ->
            run planner(0); run planner(1);
#if N == 3
            run planner(2);
#endif
            skip
        fi;
        run trainer(0); run trainer(1);
#if N == 3
        run trainer(2);
#endif
        run outside()
    };
    atomic {
        RETURNED(0) && RETURNED(1) && RETURNED(N-1);
        check_end();
        done = 1
    }
}

ltl ends { <> done }
