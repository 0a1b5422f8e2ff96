/*
 * What a planner decides, from its own state and from gathered records; part of odb.pml.
 *
 * `rest`, `num` and the like are scratch variables that live inside one atomic block.
 */

#define LEAVE_AS(r, how) result[r] = how; goto out

/* Wait for the exchange; leave when it fails, when a record reports an error, when one closes. */
inline leave_unless_met(r, is_met, is_failed, is_closing) {
    if
    :: is_met
    :: DEADLINE(r, is_met) -> NEVER(PEERS_DEADLINE, true); LEAVE_AS(r, failed)
    fi;
    if
    :: is_failed -> LEAVE_AS(r, failed)
    :: !(is_failed) && is_closing -> LEAVE_AS(r, stopped)
    :: else
    fi
}

/* Values nobody reads any more: fewer states. */
inline forget(x, y, z) {
    x = 0; y = 0; z = 0
}

/* The last exchange anybody enters is the first that carries a closing bit. */
inline enter_exchange(r) {
    entered[r]++;
    if
    :: CLOSING(r) && closing_at == 255 -> closing_at = entered[r]
    :: else
    fi;
    assert(entered[r] <= closing_at)
}

/* Building a record may meet an error (the record says so) or never end. */
inline build_maybe(r, flag) {
#if FAULT == ERROR || FAULT == HANG
    if
    :: r == victim && !struck -> struck = 1;
#if FAULT == HANG
        goto out
#elif defined(MUTATE_ERROR_UNTOLD)
        LEAVE_AS(r, failed)
#else
        flag = 1
#endif
    :: true
    fi
#else
    skip
#endif
}

/* ---- first exchange ---- */

/* Fill the window. ONLINE has done so in commit; with QUOTA it is always full. */
inline draw(r) {
#if DRAW == FIXED
    num = SIZE(held[r]);
    do
    :: num < window && next[r] < last[r] ->
        if
        :: held[r] = held[r] | BIT(next[r]); num++
#ifdef HOLES
        :: left_out = left_out | BIT(next[r])
#endif
        fi;
        next[r]++
    :: else -> break
    od;
    rest = last[r] - next[r]
#elif DRAW == BATCH
    /* Position p of the stream belongs to replica p % N. */
    held[r] = 0; rest = 0; at = next[r];
    do
    :: at < total ->
        if
        :: at % N == r && at < next[r] + batch -> held[r] = held[r] | BIT(at)
        :: at % N == r && at >= next[r] + batch -> rest++
        :: else
        fi;
        at++
    :: else -> break
    od
#else
    rest = 0
#endif
}

inline enter_window_exchange(r) {
    draw(r);
    build_maybe(r, w_failed[r]);
#ifdef MUTATE_SKIP_CLOSING_EXCHANGE
    if
    :: CLOSING(r) -> LEAVE_AS(r, stopped)
    :: else
    fi;
#endif
    w_undrawn[r] = rest;
    w_held[r] = (DRAW == QUOTA -> window : SIZE(held[r]));
#ifdef MUTATE_STOP_WHEN_DRAINED
    if
    :: w_held[r] == 0 && rest == 0 -> LEAVE_AS(r, finished)
    :: else
    fi;
#endif
    w_closing[r] = CLOSING(r);
    enter_exchange(r)
}

/* ---- between the exchanges: any selection that keeps the progress rule ---- */

#ifdef MUTATE_SELECT_NOTHING
#define MUST_EMIT(r) false
#elif defined(REPLAY)
#define MUST_EMIT(r) false
#elif RULE == EACH
#define MUST_EMIT(r) (w_held[r] > 0)
#else /* the first replica that holds samples */
#define MUST_EMIT(r) (w_held[r] > 0 && (r == 0 || (w_held[0] == 0 && (r == 1 || w_held[1] == 0))))
#endif

#if DRAW == QUOTA
#define ANY_LEFT (next[r] < total)
#elif DRAW == ONLINE
#define ANY_LEFT (SUM(w_held) > 0 || next[r] < total)
#else
#define ANY_LEFT (SUM(w_held) + SUM(w_undrawn) > 0 || left_out)
#endif

/* What `plan/termination.py` calls steps_bound: a rest below a quarter of a batch is no step. */
#define STEPS_BOUND(x) (4 * (x) <= 5 * batch -> 1 : CEIL(4 * (x) - batch, 4 * batch))

/* A replica has nothing left to draw. Online this is known before the exchange. */
#if DRAW == ONLINE
#define ANY_DRAINED(r) (next[r] == total)
#else
#define ANY_DRAINED(r) (w_undrawn[0] == 0 || w_undrawn[1] == 0 || w_undrawn[N-1] == 0)
#endif

/* rest = steps left, this one included. When it is 1, all that is left is drawn and emitted. */
inline steps_left(r) {
    num = SUM(w_held) + SUM(w_undrawn) + (DRAW == ONLINE -> total - next[r] : 0);
    rest = STEPS_BOUND(num);
    if
    :: ANY_DRAINED(r) && max_drain == 0 -> max_drain = committed[r] + rest
    :: else
    fi;
#ifdef MUTATE_DEADLINE_MOVES
    last_step[r] = 0;
#endif
    if
    :: ANY_DRAINED(r) && last_step[r] == 0 -> last_step[r] = committed[r] + rest
    :: else
    fi;
    if
    :: last_step[r] > 0 -> rest = MIN2(rest, last_step[r] - committed[r])
    :: else
    fi;
    assert(rest > 0)
}

inline draw_all(r) {
#if DRAW == ONLINE
    do
    :: next[r] < total ->
        if
        :: next[r] % N == r -> held[r] = held[r] | BIT(next[r])
        :: else
        fi;
        next[r]++
    :: else -> break
    od
#else
    held[r] = held[r] | (BIT(last[r]) - BIT(next[r]));
    next[r] = last[r]
#endif
}

/* chosen = the selection, num = its size. */
inline select_samples(r) {
#ifdef DRAIN
    steps_left(r);
    if
    :: rest == 1 -> draw_all(r); chosen = held[r]
    :: else -> select_any(r)
    fi;
    num = SIZE(chosen)
#else
    select_any(r)
#endif
}

inline select_any(r) {
#ifdef REPLAY
    chosen = replayed[committed[r] * N + r];
    assert((chosen & held[r]) == chosen && (chosen != 0 || !MUST_EMIT(r)));
    num = SIZE(chosen)
#elif DRAW == BATCH
    chosen = held[r];
    num = SIZE(chosen)
#elif DRAW == QUOTA
    /* What is left of the quota is shared evenly; the first replicas take the odd ones. */
    rest = total - next[r];
#ifndef MUTATE_QUOTA_NOT_SHARED
    rest = rest / N + (r < rest % N);
#endif
    rest = MIN2(rest, w_held[r]);
    num = (rest > 0);
    do
    :: num < rest -> num++
    :: break
    od;
    chosen = num
#else
    chosen = (MUST_EMIT(r) -> held[r] & -held[r] : 0); /* its lowest bit */
    do
    :: chosen != held[r] -> chosen = (chosen - held[r]) & held[r] /* the next part of held */
    :: break
    od;
    num = SIZE(chosen)
#endif
}

/* ---- second exchange ---- */

inline enter_plan_exchange(r) {
    build_maybe(r, p_failed[r]);
    p_need[r] = CEIL(num, FIT);
    p_samples[r] = num;
#if DRAW == FIXED
    p_remaining[r] = SIZE(held[r]) + last[r] - next[r] - num;
#else
    p_remaining[r] = (DRAW == QUOTA -> 0 : SIZE(held[r]) + w_undrawn[r] - num);
#endif
    p_closing[r] = CLOSING(r);
    NEVER(CLOSING_IN_PLAN_RECORD, p_closing[r]);
#ifdef MUTATE_EMIT_BEFORE_COMMIT
    held[r] = held[r] - chosen;
#endif
    enter_exchange(r)
}

/* ---- third exchange ---- */

/* Which steps have one is left open, but it is the same for all: whoever comes first decides. Not
   before all have entered the second exchange, and none is left undecided when the next begins. */
#ifdef THIRD
inline decide_third(r) {
#ifdef REPLAY
    third = replayed_third[committed[r]];
    assert(third == NO_THIRD || SUM(p_samples) > 0)
#else
    if
    :: third == UNDECIDED ->
        if
        :: SUM(p_samples) > 0 -> third = HAS_THIRD
        :: third = NO_THIRD
        fi
    :: else
    fi
#endif
}
#endif

#ifdef MUTATE_SKIP_EMPTY_LIST
#define IN_THIRD(r) (third == HAS_THIRD && p_samples[r] > 0)
#elif defined(MUTATE_SKIP_WHEN_DRAINED)
#define IN_THIRD(r) (third == HAS_THIRD && p_remaining[r] > 0)
#else
#define IN_THIRD(r) (third == HAS_THIRD)
#endif

/* A list has no closing bit, and nobody enters who has seen one. */
inline enter_third_exchange(r) {
    build_maybe(r, l_failed[r]);
    listed[r] = 1;
    assert(closing_at == 255);
    NEVER(EMPTY_LIST, p_samples[r] == 0);
    NEVER(FAILED_LIST, l_failed[r]);
    NEVER(ASKED_IN_THIRD, CLOSING(r))
}

/* common = M. After a third exchange any replica may train any sample. */
inline common_count(r) {
#ifdef MUTATE_COUNT_MIN
    common = MIN(p_need);
#elif defined(MUTATE_COUNT_OWN)
    common = p_need[r];
#else
    common = MAX(p_need);
#endif
#ifdef THIRD
    common = (IN_THIRD(r) -> CEIL(SUM(p_samples), N * FIT) : common);
#endif
    common = CEIL(MAX2(1, common), MULTIPLE) * MULTIPLE;
#ifdef MUTATE_COUNT_NOT_MULTIPLE
    common = MAX2(1, MAX(p_need));
#endif
#ifdef THIRD
    assert(IN_THIRD(r) || common >= p_need[r]);
    assert(common * N * FIT >= SUM(p_samples));
#else
    assert(common >= p_need[r]);
#endif
    assert(common % MULTIPLE == 0)
}

#define SAME_M(j, r) (committed[j] != committed[r] || planned_m[j] == planned_m[r])

/* Fix the step; rest = samples of all replicas that are left after it. */
inline commit(r) {
    planned_m[r] = common;
    committed[r]++;
    assert(SAME_M(0, r) && SAME_M(1, r) && SAME_M(N-1, r)); /* equal M */
    printf("replica %d step %d samples %d M %d\n", r, committed[r] - 1, chosen, common);
#if DRAW == QUOTA
    num_emitted = num_emitted + p_samples[r];
    assert(num_emitted <= total);
    next[r] = next[r] + SUM(p_samples);
    rest = total - MIN2(total, next[r]);
#else
    assert((emitted & chosen) == 0); /* no sample twice */
    emitted = emitted | chosen;
#ifndef MUTATE_EMIT_BEFORE_COMMIT
    held[r] = held[r] - chosen;
#endif
    rest = SUM(p_remaining);
#if DRAW == ONLINE
    rest = rest + total - next[r];
    draw_online(r);
#elif DRAW == BATCH
    next[r] = MIN2(total, next[r] + batch);
    held[r] = 0;
#endif
#endif
#ifdef MUTATE_FINAL_BY_REPLICA
    rest = p_remaining[r];
#endif
    assert(SUM(p_samples) > 0 || left_out); /* progress */
    assert(committed[r] <= max_steps);
    NEVER(LATEST_END, committed[r] == max_steps);
    NEVER(IDLE_MICRO_BATCH, p_samples[r] < common);
    NEVER(ALL_IDLE_STEP, SUM(p_samples) == 0);
    check_drain(r)
}

/* Each replica draws as many as it emitted, in replica order. */
inline draw_online(r) {
    cursor = next[r]; each = 0;
    do
    :: each < N ->
        num = MIN2(p_samples[each], total - cursor);
#ifdef MUTATE_DRAW_TWICE
        at = next[r];
#else
        at = cursor;
#endif
        if
        :: each == r -> held[r] = held[r] | (BIT(at + num) - BIT(at))
        :: else
        fi;
        cursor = cursor + num;
        each++
    :: else -> break
    od;
    next[r] = cursor
}

/* The bound on the steps after the first replica is drained. */
inline check_drain(r) {
#ifdef DRAIN
    /* steps_left has set it */
#elif DRAW == FIXED
    if
    :: max_drain == 0 && (p_remaining[0] == 0 || p_remaining[1] == 0 || p_remaining[N-1] == 0) ->
        max_drain = committed[r] + (RULE == EACH -> MAX(p_remaining) : SUM(p_remaining))
    :: else
    fi;
#elif DRAW == ONLINE
    if
    :: max_drain == 0 && next[r] == total ->
        max_drain = committed[r] + (RULE == EACH -> window : N * window)
    :: else
    fi;
#endif
    NEVER(DRAINED_EARLY, committed[r] < max_drain && p_samples[r] == 0);
    assert(max_drain == 0 || committed[r] <= max_drain)
}

/* ---- trainer ---- */

#define SAME_STEP(j, r) (in_step[j] != in_step[r] || trained_m[j] == trained_m[r])

inline enter_step(r) {
    trained_m[r] = m; m = 0;
    in_step[r]++;
    assert(SAME_STEP(0, r) && SAME_STEP(1, r) && SAME_STEP(N-1, r))
}

/* A stop request is met within plan_ahead steps, the one in progress and the one put last. */
#ifdef PUT_AFTER
#define MAX_STEPS_TO_STOP (AHEAD + 2)
#else
#define MAX_STEPS_TO_STOP (AHEAD + 1)
#endif

inline leave_step(r) {
    trained[r]++;
    NEVER(LATEST_STOP, asked[r] && trained[r] - asked_at[r] == MAX_STEPS_TO_STOP);
    assert(!asked[r] || trained[r] - asked_at[r] <= MAX_STEPS_TO_STOP)
}
