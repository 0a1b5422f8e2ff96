/*
 * The worlds that are tried, and what must hold when all have returned; part of odb.pml.
 */

inline choose(variable, least, most) {
    variable = least;
    do
    :: variable < most -> variable++
    :: break
    od
}

#ifdef REPLAY
/* given_world(), shard[] and replayed[] come from the file that includes odb.pml. */
#define CHOOSE(variable, least, most) skip
#else
#define CHOOSE(variable, least, most) choose(variable, least, most)
#endif

inline choose_world() {
#ifdef REPLAY
    given_world();
#endif
    CHOOSE(window, 1, WINDOW);
#if DRAW == FIXED
    total = 0; each = 0;
    do
    :: each < N ->
#ifdef REPLAY
        num = shard[each];
#else
        at = MIN2(MOST, TOTAL - total);
        choose(num, 0, at);
#endif
        next[each] = total;
        total = total + num;
        last[each] = total;
        max_steps = (RULE == EACH -> MAX2(max_steps, num) : total);
        each++
    :: else -> break
    od;
#ifdef DRAIN
    max_steps = total;
#else
    if
    :: last[0] == 0 || last[1] == next[1] || last[N-1] == next[N-1] -> max_drain = max_steps
    :: else
    fi;
#endif
#else
    CHOOSE(total, LEAST, TOTAL);
#endif
#if DRAW == ONLINE
    cursor = 0; each = 0;
    do
    :: each < N ->
        num = MIN2(window, total - cursor);
        held[each] = BIT(cursor + num) - BIT(cursor);
        cursor = cursor + num;
        each++
    :: else -> break
    od;
    next[0] = cursor; next[1] = cursor; next[N-1] = cursor;
    max_steps = total;
#elif DRAW == BATCH
    CHOOSE(batch, 1, N + 1);
    max_steps = CEIL(total, batch);
#elif DRAW == QUOTA
    max_steps = CEIL(total, N);
#endif
#if defined(DRAIN) && !defined(REPLAY)
    choose(batch, 1, 3);
#endif
#if FAULT == LEAVE
    choose(leave_after, 0, 3);
#elif FAULT != NONE
    choose(victim, 0, N - 1);
#endif
    printf("world total %d batch %d window %d fit %d multiple %d\n", total, batch, window, FIT, MULTIPLE)
}

#define ALL_ARE(x) (result[0] == x && result[1] == x && result[N-1] == x)
#define ALL_HELD (held[0] | held[1] | held[N-1])
#define UNDRAWN(r) (BIT(last[r]) - BIT(next[r]))
#define EVERY_SAMPLE (BIT(total) - 1)
#define EXCUSED(r) (gone[r] || result[r] == failed || trained[r] == committed[r] || (FAULT == RAISE && r == victim))

inline check_end() {
#if FAULT == CRASH || FAULT == RAISE
    /* Who is not told of the fault has trained all that was planned. */
    assert(EXCUSED(0) && EXCUSED(1) && EXCUSED(N-1));
#else
    assert(!ANY(gone)); /* neither deadline of close() nor watchdog was needed */
    assert(ALL_ARE(finished) || ALL_ARE(stopped) || ALL_ARE(failed));
    assert(EQUAL(committed) || FAULT == HANG);
    assert(EQUAL(trained)); /* a common last step */
#if FAULT == LEAVE
    assert(trained[0] == MIN2(leave_after, committed[0]));
#else
    assert(trained[0] == committed[0]);
#endif
#endif
#if FAULT == NONE || FAULT == LEAVE
    assert(!ALL_ARE(failed));
#ifndef STOPS
    assert(ALL_ARE(finished) || FAULT == LEAVE);
#endif
#elif FAULT == ERROR || FAULT == HANG
    assert(ALL_ARE(failed) == struck);
#endif
    if
    :: ALL_ARE(finished) ->
#if DRAW == QUOTA
        assert(num_emitted == total); /* quota closure */
#else
        assert((emitted | left_out) == EVERY_SAMPLE && (emitted & left_out) == 0); /* coverage */
#endif
#if DRAW == BATCH
        assert(committed[0] == max_steps)
#endif
    :: ALL_ARE(stopped) ->
        /* What was not emitted is still held or not drawn: a resumed run finds it. */
#if DRAW == FIXED
        left_out = left_out | ALL_HELD | UNDRAWN(0) | UNDRAWN(1) | UNDRAWN(N-1);
#elif DRAW == ONLINE
        left_out = ALL_HELD | (BIT(total) - BIT(next[0]));
#elif DRAW == BATCH
        left_out = BIT(total) - BIT(next[0]);
#endif
#if DRAW != QUOTA
        assert((emitted | left_out) == EVERY_SAMPLE && (emitted & left_out) == 0)
#endif
    :: else
    fi
}
