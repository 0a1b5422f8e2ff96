/*
 * Micro-batches that replicas share, within one step, for SPIN; docs/concepts.md explains it.
 *
 * REPLICAS replicas of STAGES pipeline stages run M micro-batches in the order of 1F1B. Each
 * micro-batch index is cut into groups of 1, 2 or 4 aligned replicas; what a stage computes of it,
 * forward and backward, is a collective of the same stage in the group's replicas. A group is made
 * by its members before the schedule, in the order of their sizes.
 *
 * Macros, set by run.py: REPLICAS, STAGES, M; MUTATE, a rule that is broken.
 */

#ifndef REPLICAS
#define REPLICAS 4
#endif
#ifndef STAGES
#define STAGES 1
#endif
#ifndef M
#define M 2
#endif

mtype = { none, OTHER_ORDER, OTHER_COUNT, NOT_ALIGNED, LARGEST_FIRST, GROUP_OF_OWN };
#ifndef MUTATE
#define MUTATE none
#endif
#define BROKEN(rule) (MUTATE == rule)

#define RANKS (REPLICAS * STAGES)
#define ID(r, s) ((s) * REPLICAS + (r))

byte width[M * REPLICAS]; /* of the group that a replica is in, by index */
byte inside[RANKS * 3];   /* members that wait, by the group's first rank and the power of its size */
byte doing[RANKS * 3];    /* and what for */
bit turn[RANKS * 3];
byte done;

chan forward[RANKS] = [1] of { byte };  /* to this rank */
chan backward[RANKS] = [1] of { byte };

#define POWER(w) ((w) / 2)
#define FIRST(r, w) ((r) / (w) * (w))

/* A collective of w replicas at stage s. All members are in the same one. */
inline meet(r, s, w, what) {
    if
    :: w == 1
    :: else ->
        d_step {
            at = ID(FIRST(r, w), s) * 3 + POWER(w);
            if
            :: BROKEN(NOT_ALIGNED) && w == 2 && r > 0 && r < 3 -> at = ID(1, s) * 3 + POWER(w)
            :: else
            fi;
            assert(inside[at] == 0 || doing[at] == what);
            doing[at] = what;
            my = turn[at];
            inside[at]++;
            if
            :: inside[at] == w -> inside[at] = 0; turn[at] = 1 - turn[at]
            :: else
            fi
        }
        turn[at] != my
    fi
}

inline run_forward(r, s) {
    if
    :: s > 0 -> forward[ID(r, s)]?num; assert(num == f)
    :: else
    fi;
    m = f;
    if
    :: BROKEN(OTHER_ORDER) && r == 1 && STAGES == 1 -> m = M - 1 - f
    :: else
    fi;
    own = width[m * REPLICAS + r];
    if
    :: BROKEN(GROUP_OF_OWN) && r == 0 && own == 2 -> own = 4
    :: else
    fi;
    meet(r, s, own, 2 * m);
    if
    :: s < STAGES - 1 -> forward[ID(r, s + 1)]!f
    :: else
    fi;
    f++
}

inline run_backward(r, s) {
    if
    :: s < STAGES - 1 -> backward[ID(r, s)]?num; assert(num == b)
    :: else
    fi;
    m = b;
    if
    :: BROKEN(OTHER_ORDER) && r == 1 && STAGES == 1 -> m = M - 1 - b
    :: else
    fi;
    own = width[m * REPLICAS + r];
    meet(r, s, own, 2 * m + 1);
    if
    :: s > 0 -> backward[ID(r, s - 1)]!b
    :: else
    fi;
    b++
}

#define USES(r, w) (width[r] == w || (M > 1 && width[(M - 1) * REPLICAS + r] == w) \
    || (M > 2 && width[(M > 2 -> REPLICAS : 0) + r] == w))

inline make_group(r, s, w) {
    if
    :: USES(r, w) -> meet(r, s, w, 255)
    :: else
    fi
}

proctype rank(byte r; byte s) {
    byte f, b, m, own, num, at, my, count;
    count = M - (BROKEN(OTHER_COUNT) && r == 1 -> 1 : 0);
    if
    :: BROKEN(LARGEST_FIRST) && r == 1 -> make_group(r, s, 4); make_group(r, s, 2)
    :: else -> make_group(r, s, 2); make_group(r, s, 4)
    fi;
    do /* 1F1B: as many forward passes ahead as there are stages behind this one */
    :: f < count && f - b < STAGES - s -> run_forward(r, s)
    :: (f == count || f - b == STAGES - s) && b < count -> run_backward(r, s)
    :: b == count -> break
    od;
    done++
}

init {
    byte r, m, s;
    atomic {
        m = 0;
        do
        :: m < M ->
            r = 0;
            do
            :: r < REPLICAS ->
                if
                :: width[m * REPLICAS + r] = 1; r++
                :: r % 2 == 0 && r + 1 < REPLICAS ->
                    width[m * REPLICAS + r] = 2; width[m * REPLICAS + r + 1] = 2; r = r + 2
                :: r == 0 && REPLICAS >= 4 ->
                    width[m * REPLICAS] = 4; width[m * REPLICAS + 1] = 4;
                    width[m * REPLICAS + 2] = 4; width[m * REPLICAS + 3] = 4; r = 4
                :: BROKEN(NOT_ALIGNED) && r == 1 && REPLICAS >= 4 ->
                    width[m * REPLICAS + 1] = 2; width[m * REPLICAS + 2] = 2; r = 3
                fi
            :: else -> break
            od;
            m++
        :: else -> break
        od;
        s = 0;
        do
        :: s < STAGES ->
            r = 0;
            do
            :: r < REPLICAS -> run rank(r, s); r++
            :: else -> break
            od;
            s++
        :: else -> break
        od
    }
    done == RANKS
}
