/*
 * The step loop of N replicas, for SPIN; docs/concepts.md explains it.
 *
 * Per replica a loop (reads, agrees, plans, delivers and packs steps, ahead of the trainer) and a
 * trainer (takes a step from a queue, then meets the other trainers in the step's device collective).
 * From top to bottom: state, groups, what a loop does, loop, trainer, worlds.
 *
 * Time is left open: each process may be slow, and a deadline runs out only when a peer is gone or
 * hangs. What the planner chooses is left open too: any M that is enough, any samples to any replica.
 *
 * Macros, set by run.py:
 *   N          replicas, 2 to 4
 *   BLOCKS     1 or 2
 *   AHEAD      plan_ahead
 *   OPEN       defined: iterators that end, nobody knows when; else samples by number
 *   UNSEEN     defined: an end may go unseen until more is asked for
 *   QUOTA      defined: besides, the run ends after so many samples
 *   FAULT      see below
 *   STOPS      defined: besides, any replicas may ask to stop, at any moment
 *   AT_ONCE    defined: the heartbeat ends trainers as soon as any loop has an error
 *   LEAST      fewest samples of the run
 *   TOTAL      most samples of the run
 *   BATCH      largest global batch size
 *   FIT        samples that fit a micro-batch
 *   MULTIPLE   the number of micro-batches is a multiple of this
 *   KEPT       defined: no sample is trained elsewhere than where it was read
 *   MUTATE     a rule that is broken, to see that the check notices
 *   OCCURS     a case that is claimed not to happen, to see that it does
 */

#define NONE 0
#define LEAVE 1 /* all trainers leave after the same step, unknown to the loops, and close() */
#define ERROR 2 /* loops meet an error, any replicas, at any point, each once */
#define HANG 3  /* one loop hangs, at any point */
#define CLOSE 6 /* one loop ends with an error and closes its connections, at any point */
#define CRASH 4 /* the process of one replica dies, at any moment */
#define RAISE 5 /* the trainer of one replica raises, at any moment, and close()s */

#ifndef N
#define N 2
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#ifndef FAULT
#define FAULT NONE
#endif
#ifndef LEAST
#define LEAST 0
#endif
#ifndef TOTAL
#define TOTAL 4
#endif
#ifndef BATCH
#define BATCH 2
#endif
#ifndef FIT
#define FIT 1
#endif
#ifndef MULTIPLE
#define MULTIPLE 1
#endif

#define SAMPLES byte /* a set of at most 8, one bit each */

mtype = { running, finished, stopped, failed };
mtype = { round, counts, samples, texts, handed }; /* what is exchanged */

/* ---- the world, chosen by init ---- */
byte total;       /* samples of the run; nobody knows it if OPEN */
byte batch;       /* global batch size */
byte first[N];    /* OPEN: first sample of the replica's iterator */
byte last[N];     /* OPEN: and the end of it */
byte quota;       /* samples that the run takes */
byte leave_after; /* LEAVE: steps that are trained */
byte victim;      /* HANG, CLOSE, CRASH, RAISE: which replica */

/* ---- what a loop knows ---- */
byte consumed[N];
byte missing[N];  /* samples that the step still lacks */
byte live[N];     /* replicas whose iterators have not ended, one bit each */
byte next[N];     /* OPEN: next sample of its iterator */
byte saved[N];    /* OPEN: the same after its last finished step, for a checkpoint */
SAMPLES read[N];  /* what it has read for this step */
byte committed[N]; /* finished steps */
bit error[N];     /* it has failed, and tells it in the next gather */
bit shut[N];      /* it has closed its connections */
mtype result[N] = running;

/* ---- groups: the blocks 0 and 1, and their first ranks ---- */
#define FIRSTS 2
byte waiting[3];  /* members in the exchange */
bit turn[3];      /* flips when all have entered */
mtype kind[3];
byte g_rows[3];   /* what they bring */
byte g_ended[3];
bit g_failed[3];
bit g_closing[3];
byte g_count;     /* most micro-batches of a block so far */
bit g_differ;     /* not all alike */

/* ---- what all find in a round ---- */
byte rows;
byte ends;        /* replicas whose iterators have ended, one bit each */
bit any_failed;
bit any_closing;

/* ---- what first ranks find, and hand on in each block ---- */
byte most;        /* micro-batches of the block that has most */
bit differ;       /* not all blocks have so many */
byte handed_most[2];
bit handed_differ[2];

/* ---- the plan of a block's step, and the sample exchange ---- */
byte planned[2];  /* steps */
byte count[2];    /* M; equal in the end */
SAMPLES part[N];  /* what a replica trains */
byte need[N];     /* from which replicas it gets samples, one bit each */
bit blank[N];     /* it has an error, and says so in place of samples */

/* ---- between loop and trainer ---- */
chan steps[N] = [AHEAD] of { byte }; /* M */
bit asked[N];     /* stop asked: train on up to the common last step */
bit closed[N];    /* close() called: no further step is taken */

/* ---- trainers and processes ---- */
byte in_step[N];  /* steps entered: the device collective of step k waits for all */
byte trained[N];
bit ended[N];     /* the trainer has returned */
bit gone[N];      /* the process is dead */
bit struck[N];    /* its fault has happened */
bit done;

/* ---- for assertions ---- */
SAMPLES emitted;
byte extra;       /* rounds beyond one per step */
byte planned_m[N];
byte trained_m[N];
byte asked_at[N];

hidden byte num, at, each, size;

/* To see that the check notices: a rule that is broken, a case that is said never to happen. */
mtype = { none, NOT_WOKEN, NO_DEADLINE, NO_HEARTBEAT, NOT_CLOSED, QUOTA_OFF_BY_ONE, SHARES_OVERLAP,
    STATE_OF_READ, ERROR_UNTOLD, SKIP_CLOSING_GATHER, COUNT_NOT_MULTIPLE, NO_SENDS, SKIP_UNMOVED,
    SKIP_EXCHANGE_AFTER_ERROR, END_EARLY, DECIDE_IN_BLOCK, ENDED_READ_ON, ROUND_TOO_FEW,
    ROUND_BY_OWN_END, PLAN_PAST_END, FAILED_BY_OWN, SKIP_COUNTS_AFTER_ERROR,
    SKIP_HANDED_AFTER_ERROR, COUNT_OF_BLOCK, COUNT_AGAIN_ONCE, SKIP_GATHER_AFTER_ERROR,
    NO_LAST_GATHER, STOP_AT_ONCE, CLOSE_WAITS_FOREVER };
mtype = { IDLE_REPLICA, FULL_WHEN_CLOSED, PEERS_DEADLINE, HEARTBEAT_NEEDED, LATEST_STOP,
    MOST_ROUNDS, MORE_MICRO_BATCHES, SAMPLE_LOST, ERROR_IN_LAST_STEP, ERROR_ALONE, ALL_FAIL,
    ERROR_AND_STOP, STAYS_OUT, PEER_SHUT, ONE_MORE };
#ifndef MUTATE
#define MUTATE none
#endif
#ifndef OCCURS
#define OCCURS none
#endif
#define BROKEN(rule) (MUTATE == rule)
#define NEVER(case, condition) assert(OCCURS != case || !(condition))

#define BIT(x) (1 << (x))
#define HAS(x, k) (((x) >> (k)) & 1)
#define SIZE4(x) (HAS(x, 0) + HAS(x, 1) + HAS(x, 2) + HAS(x, 3))
#define SIZE(x) (SIZE4(x) + SIZE4((x) >> 4))
#define MAX2(x, y) ((x) > (y) -> (x) : (y))
#define MIN2(x, y) ((x) < (y) -> (x) : (y))
#define CEIL(x, y) (((x) + (y) - 1) / (y))

/* Over replicas 0, 1, N-2 and N-1: these are all. */
#define ANY(x) (x[0] || x[1] || x[N-2] || x[N-1])
#define ALL_ARE(x, y) (x[0] == y && x[1] == y && x[N-2] == y && x[N-1] == y)
#define EQUAL(x) ALL_ARE(x, x[0])
#define MIN(x) MIN2(MIN2(x[0], x[1]), MIN2(x[N-2], x[N-1]))
#define ANY_OF(f, r) (f(0, r) || f(1, r) || f(N-2, r) || f(N-1, r))
#define EVERY(f, r) (f(0, r) && f(1, r) && f(N-2, r) && f(N-1, r))

#if BLOCKS == 1
#define BLOCK(r) 0
#define MEMBERS(g) N
#define IS_FIRST(r) false
#else /* as even as can be */
#define BLOCK(r) ((r) >= N / 2)
#define MEMBERS(g) ((g) == FIRSTS -> 2 : ((g) == 0 -> N / 2 : N - N / 2))
#define IS_FIRST(r) ((r) == 0 || (r) == N / 2)
#endif

#define CLOSING(r) (asked[r] || closed[r])
#define WOKEN(r) (closed[r] && !BROKEN(NOT_WOKEN))

/* An exchange with a dead process may complete or not: gloo promises neither. With a process that
   lives and does not answer, the deadline runs while the own trainer waits for a step. */
#define WAITS(r) (empty(steps[r]) && in_step[r] == trained[r] && !closed[r] && !ended[r])
#define IS_LATE(r, is_met) (FAULT == HANG && ANY(struck) && !(is_met) && WAITS(r))
#define DEADLINE(r, is_met) ((ANY(gone) || IS_LATE(r, is_met)) && !BROKEN(NO_DEADLINE))

/* The heartbeat ends a process whose trainer waits in a collective for a trainer that has left. */
#define IS_ABSENT(j, r) ((gone[j] || ended[j]) && in_step[j] < in_step[r])
#ifdef AT_ONCE
#define IS_TOLD(r) (ANY(gone) || ANY(error))
#else
#define IS_TOLD(r) (ANY(gone) || result[r] == failed)
#endif
#define HEARTBEAT(r) (IS_TOLD(r) && ANY_OF(IS_ABSENT, r) && !BROKEN(NO_HEARTBEAT))

/* ---- exchanges: complete when all members have entered, and all are in the same one ---- */

inline enter(g, what) {
    my = turn[g];
    assert(waiting[g] == 0 || kind[g] == what);
    kind[g] = what;
    waiting[g]++;
    if
    :: waiting[g] == MEMBERS(g) ->
        waiting[g] = 0; kind[g] = 0; turn[g] = 1 - turn[g];
        if
        :: (what == round && BLOCKS == 1) || g == FIRSTS -> find(g, what)
        :: what == handed && g != FIRSTS -> handed_most[g] = most; handed_differ[g] = differ
        :: else
        fi
    :: else
    fi
}

#define LEAVE_AS(r, how) result[r] = how; goto out
#define IS_SHUT_IN(j, g) (shut[j] && ((g) == FIRSTS -> IS_FIRST(j) : BLOCK(j) == (g)))

inline meet(r, g) {
    if
    :: turn[g] != my
    :: ANY_OF(IS_SHUT_IN, g) -> NEVER(PEER_SHUT, true); shut[r] = 1; LEAVE_AS(r, failed)
    :: DEADLINE(r, turn[g] != my) -> NEVER(PEERS_DEADLINE, true); LEAVE_AS(r, failed)
    fi
}

/* The last to enter: from the records of all. */
inline find(g, what) {
    if
    :: what == round ->
        rows = g_rows[g]; ends = g_ended[g];
        any_failed = g_failed[g]; any_closing = g_closing[g];
        forget(g)
    :: what == counts -> most = g_count; g_count = 0; differ = g_differ; g_differ = 0
    :: else
    fi
}

inline forget(g) {
    g_rows[g] = 0; g_ended[g] = 0; g_failed[g] = 0; g_closing[g] = 0
}

/* The first rank of a block brings what its members have brought. */
inline bring(r) {
    g_rows[FIRSTS] = g_rows[FIRSTS] + g_rows[BLOCK(r)];
    g_ended[FIRSTS] = g_ended[FIRSTS] | g_ended[BLOCK(r)];
    g_failed[FIRSTS] = g_failed[FIRSTS] || g_failed[BLOCK(r)];
    g_closing[FIRSTS] = g_closing[FIRSTS] || g_closing[BLOCK(r)];
    forget(BLOCK(r))
}

/* ---- what a loop does ---- */

/* Whatever it computes may meet an error, or never end. */
inline compute(r) {
#if FAULT == ERROR
    if
    :: !struck[r] -> struck[r] = 1; error[r] = 1
    :: true
    fi
#elif FAULT == HANG
    if
    :: r == victim && !struck[r] -> struck[r] = 1; goto out
    :: true
    fi
#elif FAULT == CLOSE
    if
    :: r == victim && !struck[r] ->
        struck[r] = 1; shut[r] = !BROKEN(NOT_CLOSED); LEAVE_AS(r, failed)
    :: true
    fi
#else
    skip
#endif
}

#if defined(OPEN) && !defined(QUOTA)
#define WANTED(r) batch
#else
#define LEFT(r) (consumed[r] < quota -> quota - consumed[r] + BROKEN(QUOTA_OFF_BY_ONE) : 0)
#define WANTED(r) MIN2(batch, LEFT(r))
#endif

/* Its share: what is missing is read by those whose iterators go on, in replica order. */
inline read_share(r) {
    size = SIZE4(live[r]);
    each = SIZE4(live[r] & (BIT(r) - 1)); /* of them before r */
    num = 0; at = 0;
    if
    :: HAS(live[r], r) ->
        num = missing[r] / size + (each < missing[r] % size);
        at = each * (missing[r] / size) + MIN2(each, missing[r] % size);
        at = (BROKEN(SHARES_OVERLAP) -> 0 : at)
    :: else
    fi;
#ifdef OPEN
    size = MIN2(num, last[r] - next[r]);
    read[r] = read[r] | ((BIT(size) - 1) << next[r]);
    next[r] = next[r] + size;
    saved[r] = (BROKEN(STATE_OF_READ) -> next[r] : saved[r]);
    g_rows[BLOCK(r)] = g_rows[BLOCK(r)] + size;
    if
    :: next[r] == last[r] -> g_ended[BLOCK(r)] = g_ended[BLOCK(r)] | BIT(r)
#ifdef UNSEEN
    :: next[r] == last[r] && num == size
#endif
    :: next[r] < last[r]
    fi
#else
    read[r] = (BIT(num) - 1) << (consumed[r] + at);
    g_rows[BLOCK(r)] = g_rows[BLOCK(r)] + num
#endif
}

/* Its record. With an error there is nothing else to tell. */
inline enter_gather(r) {
    compute_unless_failed(r);
    if
    :: !error[r] -> read_share(r)
    :: else ->
        g_failed[BLOCK(r)] = !BROKEN(ERROR_UNTOLD);
        NEVER(ERROR_IN_LAST_STEP, consumed[r] < quota && (consumed[0] == quota || consumed[1] == quota));
        NEVER(ERROR_AND_STOP, CLOSING(r))
    fi;
    if
    :: BROKEN(SKIP_CLOSING_GATHER) && CLOSING(r) -> LEAVE_AS(r, stopped)
    :: else -> g_closing[BLOCK(r)] = g_closing[BLOCK(r)] || CLOSING(r)
    fi;
    assert(!any_closing); /* nobody enters another after the one that carried the bit */
    enter(BLOCK(r), round)
}

/* M of a block: any number that is enough, at least 1, rounded up. */
inline count_micro_batches(b) {
    size = 0; each = 0;
    do
    :: each < N -> size = size + (BLOCK(each) == b -> SIZE(read[each]) : 0); each++
    :: else -> break
    od;
    num = CEIL(size, MEMBERS(b) * FIT); num = MAX2(1, num);
    do
    :: num < CEIL(size, FIT) -> num++
    :: break
    od;
    count[b] = (BROKEN(COUNT_NOT_MULTIPLE) -> num : CEIL(num, MULTIPLE) * MULTIPLE)
}

/* Planned again with at least as many as the block that has most, it may be one more. */
inline count_again(b) {
    if
    :: count[b] < handed_most[b] ->
        count[b] = handed_most[b];
        if
        :: count[b] + MULTIPLE <= CEIL(BATCH, FIT) ->
            count[b] = count[b] + MULTIPLE; NEVER(ONE_MORE, true)
        :: true
        fi
    :: else
    fi
}

inline bring_count(b) {
    g_differ = g_differ || (g_count > 0 && g_count != count[b]);
    g_count = MAX2(g_count, count[b])
}

/* Which samples a replica of the block trains, the same on all: whoever comes first chooses. */
inline plan_block(r) {
    if
    :: planned[BLOCK(r)] == committed[r] ->
        planned[BLOCK(r)]++;
        at = 0;
        do
        :: at < 8 ->
            each = 0; /* who has read it */
            do
            :: each < N && !HAS(read[each], at) -> each++
            :: else -> break
            od;
            if
            :: each < N && BLOCK(each) == BLOCK(r) -> give_one(r)
            :: else
            fi;
            at++
        :: else -> break
        od
    :: else
    fi
}

/* Sample `at`, which replica `each` has read, to a replica of the block with room. */
inline give_one(r) {
    num = each;
#ifndef KEPT
    if
    :: num = 0
    :: num = 1
#if N > 2
    :: num = N - 1
#endif
#if N > 3
    :: num = N - 2
#endif
    fi;
#endif
    do
    :: BLOCK(num) == BLOCK(r) && SIZE(part[num]) < count[BLOCK(r)] * FIT -> break
    :: else -> num = (num + 1) % N
    od;
    part[num] = part[num] | BIT(at);
    if
    :: num != each -> need[num] = need[num] | BIT(each)
    :: else
    fi
}

#define GETS_FROM(j, r) HAS(need[j], r)
#define GETS_NONE(j, r) (BLOCK(j) == BLOCK(r) && blank[j])
#define IS_UNMOVED(r) (need[r] == 0 && !ANY_OF(GETS_FROM, r))
#define STAYS_AWAY(r) ((BROKEN(SKIP_UNMOVED) && IS_UNMOVED(r)) || \
    (BROKEN(SKIP_EXCHANGE_AFTER_ERROR) && error[r]))

/* The samples that others train: the whole block exchanges, also where nothing moves. */
inline enter_samples(r) {
    NEVER(STAYS_OUT, IS_UNMOVED(r));
    blank[r] = error[r];
    if
    :: BROKEN(NO_SENDS) -> my = turn[BLOCK(r)] /* waits for what others send, and sends nothing */
    :: else -> enter(BLOCK(r), samples)
    fi
}

#define SAME_M(j, r) (committed[j] != committed[r] || planned_m[j] == planned_m[r])
#define SAME_CONSUMED(j, r) (committed[j] != committed[r] || consumed[j] == consumed[r])

inline commit(r) {
    planned_m[r] = count[BLOCK(r)];
    committed[r]++;
    consumed[r] = consumed[r] + WANTED(r) - missing[r];
    saved[r] = next[r];
    assert(EVERY(SAME_M, r) && EVERY(SAME_CONSUMED, r));
    assert(planned_m[r] % MULTIPLE == 0 && SIZE(part[r]) <= planned_m[r] * FIT);
    assert((emitted & part[r]) == 0); /* no sample twice */
    emitted = emitted | part[r];
    NEVER(IDLE_REPLICA, part[r] == 0);
    assert(committed[r] <= CEIL(quota, batch));
    printf("replica %d step %d consumed %d next %d\n", r, committed[r], consumed[r], next[r] - first[r]);
    part[r] = 0; need[r] = 0; read[r] = 0
}

inline compute_unless_failed(r) {
    if
    :: !error[r] -> compute(r)
    :: else
    fi
}

#define GOES_ON(r) (BROKEN(ROUND_BY_OWN_END) -> HAS(live[r], r) : live[r] != 0)

/* What the first ranks of the blocks have exchanged, to the others of the block. */
inline hand_on(r) {
    atomic {
        if
        :: IS_FIRST(r) -> meet(r, FIRSTS)
        :: else
        fi;
        enter(BLOCK(r), handed)
    }
}

/* Each wait is one blocking statement; what follows it touches only what the replica itself
   writes, and what its peers do not write before it enters its next exchange. So atomic blocks
   hide no interleaving that matters. */
proctype loop(byte r) {
    bit my;    /* of the exchange it is in: not complete while turn is this */
#if defined(OPEN) && !defined(QUOTA)
    bit knows; /* who has ended: iterators tell it in a first round, of nothing */
#else
    bit knows = 1;
#endif
    bit ends_with_texts;
again:
    {
        atomic {
            if
            :: BROKEN(END_EARLY) && r == 0 && consumed[r] > 0 && consumed[r] + batch >= total ->
                LEAVE_AS(r, finished)
            :: else
            fi;
            missing[r] = (knows -> WANTED(r) : 0)
        };
another_round:
        atomic { enter_gather(r) };
gathered:
        atomic {
            meet(r, BLOCK(r));
#if BLOCKS == 2
            if
            :: IS_FIRST(r) && ends_with_texts -> enter(FIRSTS, texts)
            :: IS_FIRST(r) && !ends_with_texts -> bring(r); enter(FIRSTS, round)
            :: BROKEN(DECIDE_IN_BLOCK) && !IS_FIRST(r) && g_closing[BLOCK(r)] ->
                LEAVE_AS(r, stopped)
            :: else
            fi
        };
        hand_on(r);
        atomic {
            meet(r, BLOCK(r));
#endif
            if
            :: ends_with_texts -> LEAVE_AS(r, failed)
            :: !ends_with_texts && any_failed ->
                NEVER(ALL_FAIL, ALL_ARE(struck, 1));
                NEVER(ERROR_ALONE, in_step[r] > MIN(committed));
                ends_with_texts = 1; enter(BLOCK(r), texts);
                goto gathered
            :: !ends_with_texts && !any_failed && any_closing && WANTED(r) > 0 ->
                LEAVE_AS(r, stopped)
            :: else
            fi;
            live[r] = (BROKEN(ENDED_READ_ON) -> live[r] : live[r] & (BIT(N) - 1 - ends));
#ifdef OPEN
            if
            :: !knows -> knows = 1; goto again
            :: else
            fi;
            missing[r] = missing[r] - rows;
            if
            :: missing[r] > 0 && GOES_ON(r) && !BROKEN(ROUND_TOO_FEW) ->
                if
                :: r == 0 -> extra++; assert(extra < N); NEVER(MOST_ROUNDS, extra == N - 1)
                :: else
                fi;
                goto another_round
            :: else
            fi;
#else
            missing[r] = missing[r] - rows;
            assert(missing[r] == 0);
#endif
            if
            :: missing[r] == WANTED(r) && !BROKEN(PLAN_PAST_END) -> /* nothing was left to read */
                LEAVE_AS(r, finished)
            :: else
            fi;
            assert(missing[r] < WANTED(r));
            compute_unless_failed(r);
            if
            :: BROKEN(FAILED_BY_OWN) && error[r] ->
                ends_with_texts = 1; enter(BLOCK(r), texts); goto gathered
            :: else
            fi;
#if BLOCKS == 1
            if
            :: planned[0] == committed[r] -> count_micro_batches(0)
            :: else
            fi;
#else
            if
            :: IS_FIRST(r) -> count_micro_batches(BLOCK(r))
            :: else
            fi
        };
compare_counts:
        atomic {
            if
            :: BROKEN(SKIP_COUNTS_AFTER_ERROR) && IS_FIRST(r) && error[r] -> goto again
            :: BROKEN(SKIP_HANDED_AFTER_ERROR) && !IS_FIRST(r) && error[r] -> goto again
            :: IS_FIRST(r) -> bring_count(BLOCK(r)); enter(FIRSTS, counts)
            :: else
            fi
        };
        hand_on(r);
        atomic {
            meet(r, BLOCK(r));
            NEVER(MORE_MICRO_BATCHES, handed_differ[BLOCK(r)]);
            if
            :: handed_differ[BLOCK(r)] && !BROKEN(COUNT_OF_BLOCK) ->
                compute_unless_failed(r);
                if
                :: IS_FIRST(r) -> count_again(BLOCK(r))
                :: else
                fi;
                if
                :: BROKEN(COUNT_AGAIN_ONCE)
                :: else -> goto compare_counts
                fi
            :: else
            fi;
#endif
            plan_block(r);
            if
            :: BROKEN(SKIP_GATHER_AFTER_ERROR) && error[r] -> LEAVE_AS(r, failed)
            :: else
            fi;
            if
            :: !STAYS_AWAY(r) -> enter_samples(r)
            :: else -> my = !turn[BLOCK(r)]
            fi
        };
        atomic {
            meet(r, BLOCK(r));
            compute_unless_failed(r); /* packs */
            if
            :: !error[r] && ANY_OF(GETS_NONE, r) -> NEVER(SAMPLE_LOST, true); error[r] = 1
            :: else
            fi;
            if
            :: error[r] -> goto again /* tells it */
            :: else -> commit(r)
            fi
        };
        atomic {
            nfull(steps[r]) || WOKEN(r);
            if
            :: full(steps[r]) -> NEVER(FULL_WHEN_CLOSED, true) /* nobody takes this step */
            :: nfull(steps[r]) -> steps[r]!planned_m[r]
            fi;
            if
            :: BROKEN(NO_LAST_GATHER) && consumed[r] == quota -> LEAVE_AS(r, finished)
            :: else -> goto again
            fi
        }
    } unless { gone[r] };
out:
    skip
}

/* ---- trainer ---- */

#define END_TRAINER(r) ended[r] = 1; goto out
#define LEAVE_TRAINER(r) closed[r] = 1; goto close
#define SAME_STEP(j, r) (in_step[j] != in_step[r] || trained_m[j] == trained_m[r])
#define NOT_BEHIND(j, r) (in_step[j] >= in_step[r])

/* A stop request is met within plan_ahead steps, the one in progress and the one put last. */
#define MAX_STEPS_TO_STOP (AHEAD + 2)

proctype trainer(byte r) {
    byte m;
take:
    {
        atomic {
            if
            :: FAULT == LEAVE && trained[r] == leave_after -> LEAVE_TRAINER(r)
            :: FAULT == RAISE && r == victim && struck[r] -> LEAVE_TRAINER(r)
            :: FAULT == RAISE && r == victim && struck[r] && nempty(steps[r]) ->
                steps[r]?m; m = 0;
                goto raises
            :: BROKEN(STOP_AT_ONCE) && asked[r] -> LEAVE_TRAINER(r)
            :: FAULT == ERROR && error[r] -> END_TRAINER(r) /* or trains what is queued first */
            :: nempty(steps[r]) && !(FAULT == LEAVE && trained[r] == leave_after) ->
                steps[r]?m;
                trained_m[r] = m; m = 0;
                in_step[r]++;
                assert(EVERY(SAME_STEP, r)) /* equal M */
            :: empty(steps[r]) && result[r] != running -> END_TRAINER(r)
            :: FAULT == HANG && r == victim && struck[r] && WAITS(r) && result[r] == running ->
                result[r] = failed; gone[r] = 1 /* its own deadline */
            fi
        };
        atomic {
            if
            :: EVERY(NOT_BEHIND, r) ->
                trained[r]++;
                NEVER(LATEST_STOP, asked[r] && trained[r] - asked_at[r] == MAX_STEPS_TO_STOP);
                assert(!asked[r] || trained[r] - asked_at[r] <= MAX_STEPS_TO_STOP);
                goto take
            :: HEARTBEAT(r) -> NEVER(HEARTBEAT_NEEDED, true); result[r] = failed; gone[r] = 1
            fi
        };
raises:
        atomic { LEAVE_TRAINER(r) };
close:
        atomic { /* the loop was woken: wait for its last exchange */
            if
            :: result[r] != running
            :: FAULT == RAISE && !BROKEN(CLOSE_WAITS_FOREVER) /* its deadline: at any moment */
            fi;
            gone[r] = (FAULT == RAISE); /* its process ends with the error */
            END_TRAINER(r)
        }
    } unless { gone[r] };
out:
    skip
}

/* ---- worlds ---- */

#define ASK(r) atomic { !asked[r] && !ended[r] -> asked[r] = 1; asked_at[r] = trained[r] }

/* Chooses when something happens from outside: at any moment, or never. */
proctype outside() {
#ifdef STOPS
    do
    :: ASK(0)
    :: ASK(1)
#if N > 2
    :: ASK(N - 1)
#endif
    :: break
    od;
#endif
    if
    :: FAULT == CRASH -> gone[victim] = 1
    :: FAULT == RAISE -> struck[victim] = 1
    :: true
    fi
}

inline choose(variable, least, most) {
    variable = least;
    do
    :: variable < most -> variable++
    :: break
    od
}

inline choose_world() {
    choose(batch, 1, BATCH);
    choose(total, LEAST, TOTAL);
#ifdef QUOTA
    choose(quota, 0, total);
#else
    quota = total;
#endif
    printf("world batch %d quota %d\n", batch, quota);
    size = 0; each = 0;
    do
    :: each < N ->
        live[each] = BIT(N) - 1;
#ifdef OPEN
        num = total - size;
        at = num;
        if
        :: each < N - 1 -> choose(num, 0, at)
        :: else
        fi;
        first[each] = size; next[each] = size; saved[each] = size;
        size = size + num;
        last[each] = size;
        printf("iterator %d\n", num);
#endif
        each++
    :: else -> break
    od;
#if FAULT == LEAVE
    choose(leave_after, 0, 3);
#elif FAULT != NONE && FAULT != ERROR
    choose(victim, 0, N - 1);
#endif
}

#define IS_EXCUSED(j, r) (gone[j] || result[j] == failed || trained[j] == committed[j] || \
    (FAULT == RAISE && j == victim))
#define SAVED(r) ((1 << saved[r]) - (1 << first[r]))

/* What was trained is what a checkpoint says: a resumed run trains the rest. */
inline assert_state() {
#ifdef OPEN
    assert(emitted == (SAVED(0) | SAVED(1) | SAVED(N-2) | SAVED(N-1)))
#else
    assert(emitted == BIT(consumed[0]) - 1)
#endif
}

inline check_end() {
#if FAULT == CRASH || FAULT == RAISE
    /* Who is not told of the fault has trained all that was planned. */
    assert(EVERY(IS_EXCUSED, 0));
#else
    assert(ALL_ARE(result, finished) || ALL_ARE(result, stopped) || ALL_ARE(result, failed));
    assert(EQUAL(trained)); /* a common last step */
#if FAULT == ERROR || FAULT == HANG || FAULT == CLOSE
    assert(ALL_ARE(result, failed) == ANY(struck));
    assert(!ANY(gone) || ANY(struck));
    assert(trained[0] <= MIN(committed));
#else
    assert(!ANY(gone) && !ALL_ARE(result, failed)); /* neither heartbeat nor deadline was needed */
    assert(EQUAL(committed));
    assert(trained[0] == (FAULT == LEAVE -> MIN2(leave_after, committed[0]) : committed[0]));
#ifndef STOPS
    assert(ALL_ARE(result, finished) || FAULT == LEAVE);
#endif
#endif
#endif
    if
    :: ALL_ARE(result, finished) ->
#ifdef QUOTA
        assert(SIZE(emitted) == quota);
        assert_state();
#else
        assert(emitted == BIT(total) - 1); /* coverage */
#endif
        assert(committed[0] == CEIL(quota, batch))
    :: ALL_ARE(result, stopped) ->
        assert_state()
    :: else
    fi
}

/* Trainer and loop of r, or all of its process. */
#define HAS_RETURNED(j, r) (gone[j] || (ended[j] && (result[j] != running || (FAULT == HANG && struck[j]))))

init {
    atomic {
        choose_world();
        run loop(0); run loop(1);
#if N > 2
        run loop(2);
#endif
#if N > 3
        run loop(3);
#endif
        run trainer(0); run trainer(1);
#if N > 2
        run trainer(2);
#endif
#if N > 3
        run trainer(3);
#endif
        run outside()
    };
    atomic {
        EVERY(HAS_RETURNED, 0);
        check_end();
        done = 1
    }
}

ltl ends_always { <> done }
