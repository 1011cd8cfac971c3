/* The work that a batch never seen asks of its layout and its plan. `geometry/layout.py`, `geometry/plan.py` and `table.py` hold the same in
   NumPy, and say what each array means. Both give the same numbers in the same order. Arrays come as buffers of int64, and leave as bytearrays
   of int64. */

typedef struct {
  int64_t q_begin, q_end, k_begin, k_end, lo, hi;
} Box;

static Box box_at(const Py_buffer *tiles, Py_ssize_t row) {
  int64_t at[TILE_COLUMNS];
  for (int column = 0; column < TILE_COLUMNS; column++) at[column] = number_at(tiles, row, column);
  return (Box){at[0], at[1], at[2], at[3], at[4], at[5]};
}

static int open_numbers(PyObject *object, Py_buffer *buffer) {
  if (PyObject_GetBuffer(object, buffer, PyBUF_RECORDS_RO)) return 0;
  const char *format = buffer->format;
  if (buffer->ndim == 1 && format != NULL && format[0] != 0 && format[1] == 0 && strchr("lq", format[0]) && buffer->itemsize == 8) return 1;
  PyErr_SetString(PyExc_ValueError, "this is no array of integers of 8 bytes");
  return 0;
}

static int64_t entry(const Py_buffer *numbers, Py_ssize_t i) {
  int64_t value;
  memcpy(&value, (const char *)numbers->buf + i * numbers->strides[0], sizeof(value));
  return value;
}

/* A bytearray for so many int64, uninitialised. */
static PyObject *new_numbers(int64_t count) { return PyByteArray_FromStringAndSize(NULL, count * 8); }

static int64_t *numbers_of(PyObject *numbers) { return (int64_t *)PyByteArray_AS_STRING(numbers); }

/* Where the first of rising numbers is that is not less. */
static int64_t first_at_least(const Py_buffer *rising, int64_t number) {
  int64_t first = 0, end = rising->shape[0];
  while (first < end) {
    int64_t middle = (first + end) / 2;
    if (entry(rising, middle) >= number) {
      end = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

/* ---- count ---- */

/* Twice the sum of max(0, x) over x < n. It wraps as in NumPy; differences are right. */
static uint64_t twice_below(uint64_t n) { return (int64_t)n > 0 ? n * (n - 1) : 0; }

/* Twice the number of keys j <= i - low of a box, summed over i < end. */
static uint64_t twice_keys(const Box *box, uint64_t end, uint64_t low) {
  uint64_t n = end - low + 1 - (uint64_t)box->k_begin;
  return twice_below(n) - twice_below(n - (uint64_t)(box->k_end - box->k_begin));
}

static int64_t pairs_in(const Box *box) {
  if (box->q_begin >= box->q_end || box->k_begin >= box->k_end || box->lo > box->hi) return 0;
  uint64_t lo = box->lo, above = (uint64_t)box->hi + 1, begin = box->q_begin, end = box->q_end;
  uint64_t twice = twice_keys(box, end, lo) - twice_keys(box, end, above) - twice_keys(box, begin, lo) + twice_keys(box, begin, above);
  return (int64_t)twice >> 1;
}

/* count(tiles): the live pairs of each, as `region.count_pairs` */
static PyObject *count_tiles(PyObject *self, PyObject *tiles) {
  Py_buffer of_tiles = {0};
  PyObject *result = NULL;
  if (!open_table(tiles, &of_tiles, 8, TILE_COLUMNS)) goto done;
  result = new_numbers(of_tiles.shape[0]);
  if (result == NULL) goto done;
  int64_t *pairs = numbers_of(result);
  PyThreadState *thread = release(of_tiles.shape[0]);
  for (Py_ssize_t i = 0; i < of_tiles.shape[0]; i++) {
    Box box = box_at(&of_tiles, i);
    pairs[i] = pairs_in(&box);
  }
  resume(thread);

done:
  PyBuffer_Release(&of_tiles);
  return result;
}

/* half(tiles, block, rows of K): as `plan.half_of_pairs` */
static PyObject *half_of_pairs(PyObject *self, PyObject *args) {
  PyObject *tiles, *result = NULL;
  Py_buffer of_tiles = {0};
  Box *boxes = NULL;
  long long block, rows;
  if (!PyArg_ParseTuple(args, "OLL", &tiles, &block, &rows)) return NULL;
  if (!in_range("block", block, 1) || !in_range("rows", rows, 0)) return NULL;
  if (!open_table(tiles, &of_tiles, 8, TILE_COLUMNS)) goto done;
  int64_t count = of_tiles.shape[0], total = 0, low = 0, high = 0, before = 0;
  boxes = malloc(count * sizeof(Box) + 1);
  if (boxes == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  PyThreadState *thread = release(count);
  for (int64_t i = 0; i < count; i++) {
    boxes[i] = box_at(&of_tiles, i);
    total += pairs_in(&boxes[i]);
    high = most(high, boxes[i].k_end);
  }
  /* more keys than `low` have half of the pairs, and `high` have; `boxes` are those that both do not decide, `before` the pairs of those below */
  while (high - low > 1 && !((low + 1) / block == high / block && high >= block)) {
    int64_t middle = low + (high - low) / 2, pairs = before, left = 0;
    for (int64_t i = 0; i < count; i++) {
      Box box = boxes[i];
      box.k_end = least(box.k_end, middle);
      pairs += pairs_in(&box);
    }
    int enough = 2 * pairs >= total;
    *(enough ? &high : &low) = middle;
    for (int64_t i = 0; i < count; i++) {
      if (enough ? boxes[i].k_begin < high : boxes[i].k_end > low) {
        boxes[left++] = boxes[i];
      } else if (!enough) {
        before += pairs_in(&boxes[i]);
      }
    }
    count = left;
  }
  resume(thread);
  int64_t half = total == 0 ? 0 : high > block ? high - high % block : high;
  result = PyLong_FromLongLong(half < rows ? half : 0);

done:
  free(boxes);
  PyBuffer_Release(&of_tiles);
  return result;
}

/* ---- join ---- */

/* Boxes of so many columns that are joined along an axis: 0 queries, 2 keys. */
typedef struct {
  int64_t *boxes, columns;
  int axis;
} Joined;

static const int64_t *row_of(const Joined *joined, int64_t i) { return joined->boxes + i * joined->columns; }

/* How two boxes differ in all but the axis and the bands: less than 0 if the first comes first. */
static int difference(const Joined *joined, const int64_t *a, const int64_t *b) {
  for (int column = 2 - joined->axis; column < 4 - joined->axis; column++) {
    if (a[column] != b[column]) return a[column] < b[column] ? -1 : 1;
  }
  for (int64_t column = TILE_COLUMNS; column < joined->columns; column++) {
    if (a[column] != b[column]) return a[column] < b[column] ? -1 : 1;
  }
  return 0;
}

static int in_order(const Joined *joined, const int64_t *a, const int64_t *b) {
  int differ = difference(joined, a, b);
  return differ ? differ < 0 : a[joined->axis] <= b[joined->axis];
}

/* Order the numbers of boxes by merging, those of equal boxes as they come; returns where they are in the end. */
static int64_t *sort_boxes(const Joined *joined, int64_t count, int64_t *order, int64_t *spare) {
  for (int64_t i = 0; i < count; i++) order[i] = i;
  for (int64_t width = 1; width < count; width *= 2) {
    for (int64_t begin = 0; begin < count; begin += 2 * width) {
      int64_t middle = least(begin + width, count), end = least(begin + 2 * width, count), a = begin, b = middle;
      for (int64_t i = begin; i < end; i++) {
        int first = a < middle && (b == end || in_order(joined, row_of(joined, order[a]), row_of(joined, order[b])));
        spare[i] = order[first ? a++ : b++];
      }
    }
    int64_t *sorted = spare;
    spare = order;
    order = sorted;
  }
  return order;
}

/* Join boxes that touch along the axis; they go to `to`, ordered. Returns how many are left. */
static int64_t join_boxes(const Joined *joined, int64_t count, int64_t *to, int64_t *order) {
  const int64_t *sorted = sort_boxes(joined, count, order, order + count);
  int64_t left = 0, columns = joined->columns;
  for (int64_t i = 0; i < count; i++) {
    const int64_t *box = row_of(joined, sorted[i]);
    int64_t *last = left ? to + (left - 1) * columns : to;
    if (left && last[joined->axis + 1] == box[joined->axis] && !difference(joined, last, box)) {
      last[joined->axis + 1] = box[joined->axis + 1];
    } else {
      memcpy(to + left++ * columns, box, columns * sizeof(int64_t));
    }
  }
  return left;
}

/* join(tiles): as `plan.merge_full`; None where that changes nothing */
static PyObject *join_tiles(PyObject *self, PyObject *tiles) {
  Py_buffer of_tiles = {0};
  PyObject *result = NULL;
  int64_t *memory = NULL;
  if (!open_table(tiles, &of_tiles, 8, TILE_COLUMNS)) goto done;
  int64_t count = of_tiles.shape[0], columns = of_tiles.shape[1], full = 0, rest = 0;
  memory = malloc(count * (3 * columns + 2) * sizeof(int64_t) + 1);
  if (memory == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  int64_t *others = memory, *boxes = others + count * columns, *spare = boxes + count * columns, *order = spare + count * columns;
  PyThreadState *thread = release(count * columns);
  for (int64_t i = 0; i < count; i++) {
    Box box = box_at(&of_tiles, i);
    int live = box.lo <= box.q_begin - box.k_end + 1 && box.hi >= box.q_end - 1 - box.k_begin;
    int64_t *to = (live ? boxes + full++ * columns : others + rest++ * columns);
    for (int64_t column = 0; column < columns; column++) to[column] = number_at(&of_tiles, i, column);
  }
  int any = full > 0;
  if (full > 1) {
    full = join_boxes(&(Joined){boxes, columns, 2}, full, spare, order);
    if (full > 1) {
      full = join_boxes(&(Joined){spare, columns, 0}, full, boxes, order);
    } else {
      memcpy(boxes, spare, columns * sizeof(int64_t));
    }
  }
  for (int64_t *box = boxes; box < boxes + full * columns; box += columns) {
    box[4] = box[0] - box[3] + 1;
    box[5] = box[1] - 1 - box[2];
  }
  resume(thread);
  if (!any) {
    result = Py_NewRef(Py_None);
    goto done;
  }
  result = new_numbers((rest + full) * columns);
  if (result == NULL) goto done;
  memcpy(numbers_of(result), others, rest * columns * sizeof(int64_t));
  memcpy(numbers_of(result) + rest * columns, boxes, full * columns * sizeof(int64_t));

done:
  free(memory);
  PyBuffer_Release(&of_tiles);
  return result;
}

/* ---- keep ---- */

/* (the tiles that `keep` says to keep, as it leaves them; which these are, or None for all). numbers: those that `keep` reads, and writes. */
static PyObject *kept_tiles(PyObject *tiles, int (*keep)(Box *, int64_t *), int64_t *numbers) {
  PyObject *left = NULL, *kept = NULL, *result = NULL;
  Py_buffer of_tiles = {0};
  if (!open_table(tiles, &of_tiles, 8, TILE_COLUMNS)) goto done;
  int64_t count = of_tiles.shape[0], some = 0;
  left = new_numbers(count * TILE_COLUMNS);
  kept = PyByteArray_FromStringAndSize(NULL, count);
  if (left == NULL || kept == NULL) goto done;
  int64_t *to = numbers_of(left);
  char *live = PyByteArray_AS_STRING(kept);
  for (int64_t i = 0; i < count; i++) {
    Box box = box_at(&of_tiles, i);
    live[i] = keep(&box, numbers);
    if (!live[i]) continue;
    int64_t row[] = {box.q_begin, box.q_end, box.k_begin, box.k_end, box.lo, box.hi};
    memcpy(to + TILE_COLUMNS * some++, row, sizeof(row));
  }
  if (PyByteArray_Resize(left, some * TILE_COLUMNS * 8) == 0) result = PyTuple_Pack(2, left, some == count ? Py_None : kept);

done:
  Py_XDECREF(left);
  Py_XDECREF(kept);
  PyBuffer_Release(&of_tiles);
  return result;
}

enum { Q_ROWS, K_ROWS, INSIDE, SOME };

static int settled(Box *box, int64_t *numbers) {
  int64_t q_rows = numbers[Q_ROWS], k_rows = numbers[K_ROWS];
  numbers[INSIDE] &= box->q_begin >= 0 && box->q_end <= q_rows && box->k_begin >= 0 && box->k_end <= k_rows;
  numbers[SOME] &= box->q_begin < box->q_end && box->k_begin < box->k_end && box->lo <= box->hi;
  int live = box->lo < box->q_end - box->k_begin && box->hi > box->q_begin - box->k_end;
  /* every difference of rows lies within, and the kernels' row - lo must not overflow */
  box->lo = least(most(box->lo, -k_rows), q_rows);
  box->hi = least(most(box->hi, -k_rows), q_rows);
  return live;
}

/* settle(tiles, rows of Q, rows of K): (tiles, which are left, or None for all), as `TileTable` holds them; AssertionError as there */
static PyObject *settle_tiles(PyObject *self, PyObject *args) {
  PyObject *tiles;
  long long q_rows, k_rows;
  if (!PyArg_ParseTuple(args, "OLL", &tiles, &q_rows, &k_rows)) return NULL;
  int64_t numbers[] = {q_rows, k_rows, 1, 1};
  PyObject *result = kept_tiles(tiles, settled, numbers);
  if (result != NULL && !numbers[INSIDE]) {
    PyErr_Format(PyExc_AssertionError, "a tile leaves the %lld query rows or the %lld key rows", q_rows, k_rows);
    Py_CLEAR(result);
  } else if (result != NULL && !numbers[SOME]) {
    PyErr_SetString(PyExc_AssertionError, "a tile or its band is empty");
    Py_CLEAR(result);
  }
  return result;
}

/* A box shrunk to its pairs, as `region.trim`; whether it has any. */
static int trimmed(Box *box) {
  Box from = *box;
  box->q_begin = most(from.q_begin, from.k_begin + from.lo);
  box->q_end = least(from.q_end, from.k_end + from.hi);
  box->k_begin = most(from.k_begin, from.q_begin - from.hi);
  box->k_end = least(from.k_end, from.q_end - from.lo);
  box->lo = most(from.lo, box->q_begin - (box->k_end - 1));
  box->hi = least(from.hi, box->q_end - 1 - box->k_begin);
  return box->q_begin < box->q_end && box->k_begin < box->k_end && box->lo <= box->hi;
}

static int in_part(Box *box, int64_t *bounds) {
  int64_t begin = bounds[0], end = bounds[1];
  box->k_begin = least(most(box->k_begin, begin), end) - begin;
  box->k_end = least(most(box->k_end, begin), end) - begin;
  box->lo += begin;
  box->hi += begin;
  return trimmed(box);
}

/* part(tiles, begin, end): (the tiles' part in these rows of keys, over these rows; which tiles have one, or None for all), as `plan.of_keys` */
static PyObject *part_of_keys(PyObject *self, PyObject *args) {
  PyObject *tiles;
  long long begin, end;
  if (!PyArg_ParseTuple(args, "OLL", &tiles, &begin, &end)) return NULL;
  if (!in_range("begin", begin, 0) || !in_range("end", end, begin)) return NULL;
  return kept_tiles(tiles, in_part, (int64_t[]){begin, end});
}

/* ---- deal ---- */

/* work(edges, regions): the live pairs of the queries of each chunk between two edges, as `layout._work_of_chunks` of regions of stride 1 */
static PyObject *work_of_chunks(PyObject *self, PyObject *args) {
  PyObject *edges, *regions, *result = NULL;
  Py_buffer of_edges = {0}, of_regions = {0};
  if (!PyArg_ParseTuple(args, "OO", &edges, &regions)) return NULL;
  if (!open_numbers(edges, &of_edges) || !open_table(regions, &of_regions, 8, TILE_COLUMNS)) goto done;
  int64_t chunks = most(of_edges.shape[0] - 1, 0);
  result = new_numbers(chunks);
  if (result == NULL) goto done;
  int64_t *work = numbers_of(result);
  memset(work, 0, chunks * sizeof(int64_t));
  PyThreadState *thread = release(of_regions.shape[0] + chunks);
  for (Py_ssize_t i = 0; i < of_regions.shape[0]; i++) {
    Box region = box_at(&of_regions, i), part = region;
    /* from the chunk on that ends after the first query */
    for (int64_t chunk = most(first_at_least(&of_edges, region.q_begin + 1) - 1, 0); chunk < chunks && entry(&of_edges, chunk) < region.q_end; chunk++) {
      part.q_begin = most(region.q_begin, entry(&of_edges, chunk));
      part.q_end = least(region.q_end, entry(&of_edges, chunk + 1));
      work[chunk] += pairs_in(&part);
    }
  }
  resume(thread);

done:
  PyBuffer_Release(&of_edges);
  PyBuffer_Release(&of_regions);
  return result;
}

typedef struct {
  int64_t load, rank, held;
} Hand;

static int lighter(const Hand *a, const Hand *b) { return a->load != b->load ? a->load < b->load : a->rank < b->rank; }

/* The first hand of a heap has changed: move it to its place. */
static void sift(Hand *heap, int64_t count) {
  Hand moved = heap[0];
  int64_t at = 0;
  for (int64_t child = 1; child < count; at = child, child = 2 * at + 1) {
    child += child + 1 < count && lighter(&heap[child + 1], &heap[child]);
    if (!lighter(&heap[child], &moved)) break;
    heap[at] = heap[child];
  }
  heap[at] = moved;
}

/* deal(work, chunks, ranks): the chunks of each rank, the work of the busiest rank, and that of all, as `layout._deal` */
static PyObject *deal_chunks(PyObject *self, PyObject *args) {
  PyObject *work, *dealt = NULL, *result = NULL;
  Py_buffer of_work = {0};
  int64_t *memory = NULL;
  Hand *heap = NULL;
  long long chunks, ranks;
  if (!PyArg_ParseTuple(args, "OLL", &work, &chunks, &ranks)) return NULL;
  if (!in_range("ranks", ranks, 1) || !in_range("chunks", chunks, 1)) return NULL;
  if (!open_numbers(work, &of_work)) goto done;
  if (chunks % ranks || of_work.shape[0] % chunks) {
    PyErr_Format(PyExc_ValueError, "there are %lld chunks, of %lld parts, for %lld ranks", chunks, (long long)of_work.shape[0], ranks);
    goto done;
  }
  int64_t parts_of_chunk = of_work.shape[0] / chunks, room = chunks / ranks, left = ranks, rows = 0, busiest = 0, total = 0;
  memory = malloc((4 * chunks + 2 * ranks) * sizeof(int64_t));
  heap = malloc(ranks * sizeof(Hand));
  dealt = new_numbers(chunks);
  if (memory == NULL || heap == NULL || dealt == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  int64_t *keys = memory, *order = keys + chunks, *spare = order + chunks, *rank_of = spare + chunks, *row = rank_of + chunks, *held = row + ranks;
  PyThreadState *thread = release(of_work.shape[0]);
  for (int64_t i = 0; i < chunks; i++) {
    keys[i] = 0;
    for (int64_t part = 0; part < parts_of_chunk; part++) keys[i] += most(entry(&of_work, i * parts_of_chunk + part), 0);
    total += keys[i];
  }
  sort_falling(keys, chunks, order, spare);
  for (int64_t rank = 0; rank < ranks; rank++) {
    heap[rank] = (Hand){0, rank, 0};
    row[rank] = -1;
    held[rank] = 0;
  }
  for (int64_t i = 0; i < chunks; i++) {
    rank_of[order[i]] = heap[0].rank;
    heap[0].load += keys[order[i]];
    busiest = most(busiest, heap[0].load);
    if (++heap[0].held == room) heap[0] = heap[--left];
    sift(heap, left);
  }
  /* ranks by their first chunk, so that neighbours in the ring hold neighbouring text */
  int64_t *hands = numbers_of(dealt);
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    int64_t rank = rank_of[chunk];
    if (row[rank] < 0) row[rank] = rows++;
    hands[row[rank] * room + held[rank]++] = chunk;
  }
  resume(thread);
  result = Py_BuildValue("OLL", dealt, (long long)busiest, (long long)total);

done:
  Py_XDECREF(dealt);
  free(memory);
  free(heap);
  PyBuffer_Release(&of_work);
  return result;
}

/* ---- need ---- */

/* A copy of records, each of which begins with the number of its group, group by group; those of a group stay in their order. NULL if there is
   no memory. */
static void *grouped(const void *records, size_t size, int64_t count, int64_t groups) {
  char *copy = malloc(most(count, 1) * size);
  int64_t *place = calloc(groups + 1, sizeof(int64_t)), group;
  if (copy != NULL && place != NULL) {
    for (int64_t i = 0; i < count; i++) {
      memcpy(&group, (const char *)records + i * size, sizeof(group));
      place[group + 1]++;
    }
    for (int64_t i = 0; i < groups; i++) place[i + 1] += place[i];
    for (int64_t i = 0; i < count; i++) {
      memcpy(&group, (const char *)records + i * size, sizeof(group));
      memcpy(copy + place[group]++ * size, (const char *)records + i * size, size);
    }
  } else {
    free(copy);
    copy = NULL;
    PyErr_NoMemory();
  }
  free(place);
  return copy;
}

/* Rows or positions [begin, end) of a group. */
typedef struct {
  int64_t group, begin, end;
} Range;

static int before(const void *a, const void *b) {
  const Range *x = a, *y = b;
  if (x->group != y->group) return x->group < y->group ? -1 : 1;
  return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Sort ranges by group and begin, drop the empty ones, and join those of a group that overlap or lie at most `gap` apart, as `rows.joined`.
   Returns how many are left. */
static int64_t join_ranges(Range *ranges, int64_t count, int64_t gap) {
  int64_t some = 0, left = 0;
  int sorted = 1;
  for (int64_t i = 0; i < count; i++) {
    if (ranges[i].begin >= ranges[i].end) continue;
    ranges[some] = ranges[i];
    sorted &= some == 0 || before(&ranges[some - 1], &ranges[some]) <= 0;
    some++;
  }
  if (!sorted) qsort(ranges, some, sizeof(Range), before);
  for (int64_t i = 0; i < some; i++) {
    if (left && ranges[i].group == ranges[left - 1].group && ranges[i].begin <= ranges[left - 1].end + gap) {
      ranges[left - 1].end = most(ranges[left - 1].end, ranges[i].end);
    } else {
      ranges[left++] = ranges[i];
    }
  }
  return left;
}

/* Room for one more record; 0 if there is no memory. */
static int more_room(void **records, size_t size, int64_t count, int64_t *room) {
  if (count < *room) return 1;
  void *more = realloc(*records, 2 * *room * size);
  if (more == NULL) {
    PyErr_NoMemory();
    return 0;
  }
  *records = more;
  *room *= 2;
  return 1;
}

/* Arrays that `needs` and `fold` are given: of sights; of the spans of keys, by position; of these spans as they are numbered. Others follow. */
enum { K_MIN, K_MAX, ORDER, START, LAST, ROW, SHARD, SHARED };

/* Open the arrays at the beginning of the arguments, which other arguments follow. `opened`: how many are open, also where this fails. */
static int open_arrays(PyObject *args, int arrays, int others, Py_buffer *of, int *opened) {
  if (PyTuple_GET_SIZE(args) != arrays + others) {
    PyErr_Format(PyExc_TypeError, "there are %zd arguments, but must be %d", PyTuple_GET_SIZE(args), arrays + others);
    return 0;
  }
  for (*opened = 0; *opened < arrays; ++*opened) {
    if (!open_numbers(PyTuple_GET_ITEM(args, *opened), &of[*opened])) return 0;
  }
  return 1;
}

/* Whether arrays have these lengths. */
static int have_lengths(const Py_buffer *of, const int64_t *lengths, int arrays) {
  for (int i = 0; i < arrays; i++) {
    if (of[i].shape[0] == lengths[i]) continue;
    PyErr_SetString(PyExc_ValueError, "these arrays are not of one length");
    return 0;
  }
  return 1;
}

/* Whether arrays have these lengths, and the spans of keys are among themselves, and of ranks. */
static int are_sound(const Py_buffer *of, const int64_t *lengths, int arrays, int64_t ranks) {
  if (!have_lengths(of, lengths, arrays)) return 0;
  for (int64_t i = 0; i < lengths[ORDER]; i++) {
    int64_t span = entry(&of[ORDER], i), rank = entry(&of[SHARD], i);
    if (span >= 0 && span < lengths[ORDER] && rank >= 0 && rank < ranks) continue;
    PyErr_SetString(PyExc_ValueError, "a rank or a span is not among these");
    return 0;
  }
  return 1;
}

enum { RANK = SHARED, NEEDS };

/* needs(k_min, k_max, order, start, last, row, shard, rank, ranks, gap): (ranges of an owner's rows that a rank needs, where those of each
   pair of a rank and an owner begin), as `Plan._needs`. rank: of each sight. */
static PyObject *needed_rows(PyObject *self, PyObject *args) {
  PyObject *ranges = NULL, *cuts = NULL, *result = NULL;
  Py_buffer of[NEEDS] = {{0}};
  void *needed = NULL;
  Range *seen = NULL, *by_pair = NULL;
  int opened = 0;
  if (!open_arrays(args, NEEDS, 2, of, &opened)) goto done;
  int64_t ranks = PyLong_AsLongLong(PyTuple_GET_ITEM(args, NEEDS)), gap = PyLong_AsLongLong(PyTuple_GET_ITEM(args, NEEDS + 1));
  if (PyErr_Occurred() || !in_range("ranks", ranks, 1) || !in_range("gap", gap, 0)) goto done;
  int64_t sights = of[RANK].shape[0], spans = of[ORDER].shape[0], room = sights + spans, found = 0;
  if (!are_sound(of, (int64_t[]){sights, sights, spans, spans, spans, spans, spans, sights}, NEEDS, ranks)) goto done;
  seen = malloc(most(sights, 1) * sizeof(Range));
  needed = malloc(most(room, 1) * sizeof(Range));
  if (seen == NULL || needed == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  /* runs of positions that each rank sees */
  for (int64_t i = 0; i < sights; i++) {
    seen[i] = (Range){entry(&of[RANK], i), entry(&of[K_MIN], i), entry(&of[K_MAX], i) + 1};
    if (seen[i].group < 0 || seen[i].group >= ranks) {
      PyErr_SetString(PyExc_ValueError, "a rank or a span is not among these");
      goto done;
    }
  }
  int64_t runs = join_ranges(seen, sights, 0);
  for (int64_t i = 0; i < runs; i++) {
    for (int64_t at = first_at_least(&of[LAST], seen[i].begin); at < spans && entry(&of[START], at) < seen[i].end; at++) {
      if (!more_room(&needed, sizeof(Range), found, &room)) goto done;
      int64_t key = entry(&of[ORDER], at), start = entry(&of[START], at), shift = entry(&of[ROW], key) - start;
      int64_t begin = most(seen[i].begin, start) + shift, stop = least(seen[i].end, entry(&of[LAST], at) + 1) + shift;
      ((Range *)needed)[found++] = (Range){seen[i].group * ranks + entry(&of[SHARD], key), begin, stop};
    }
  }
  by_pair = grouped(needed, sizeof(Range), found, ranks * ranks);
  if (by_pair == NULL) goto done;
  found = join_ranges(by_pair, found, gap);
  ranges = new_numbers(2 * found);
  cuts = new_numbers(ranks * ranks + 1);
  if (ranges == NULL || cuts == NULL) goto done;
  int64_t *rows = numbers_of(ranges), *cut = numbers_of(cuts), pair = 0;
  for (int64_t i = 0; i < found; i++) {
    while (pair <= by_pair[i].group) cut[pair++] = i;
    rows[2 * i] = by_pair[i].begin;
    rows[2 * i + 1] = by_pair[i].end;
  }
  while (pair <= ranks * ranks) cut[pair++] = found;
  result = PyTuple_Pack(2, ranges, cuts);

done:
  Py_XDECREF(ranges);
  Py_XDECREF(cuts);
  free(seen);
  free(needed);
  free(by_pair);
  while (opened) PyBuffer_Release(&of[--opened]);
  return result;
}

/* ---- look ---- */

/* A span of queries, and a region that it meets. */
typedef struct {
  int64_t query, region;
} Sight;

enum { Q_ORDER, Q_FROM, Q_TO, Q_FIRST, Q_LAST, LOOK };

/* look(order, start, last, q_start, q_last, regions): (query, region, k_min, k_max) as `span.look` has them of spans of stride 1. order, start,
   last: of the spans of queries, by position; q_start, q_last: as they are numbered. */
static PyObject *look_at_regions(PyObject *self, PyObject *args) {
  PyObject *found[4] = {NULL}, *result = NULL;
  Py_buffer of[LOOK] = {{0}}, of_regions = {0};
  void *sights = NULL;
  Sight *by_query = NULL;
  int opened = 0;
  if (!open_arrays(args, LOOK, 1, of, &opened) || !open_table(PyTuple_GET_ITEM(args, LOOK), &of_regions, 8, TILE_COLUMNS)) goto done;
  int64_t spans = of[Q_ORDER].shape[0], room = spans + of_regions.shape[0] + 1, count = 0;
  if (!have_lengths(of, (int64_t[]){spans, spans, spans, spans, spans}, LOOK)) goto done;
  sights = malloc(room * sizeof(Sight));
  if (sights == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  for (int64_t region = 0; region < of_regions.shape[0]; region++) {
    Box part = box_at(&of_regions, region);
    for (int64_t at = first_at_least(&of[Q_TO], part.q_begin); at < spans && entry(&of[Q_FROM], at) < part.q_end; at++) {
      int64_t query = entry(&of[Q_ORDER], at);
      if (query < 0 || query >= spans) {
        PyErr_SetString(PyExc_ValueError, "a span is not among these");
        goto done;
      }
      if (!more_room(&sights, sizeof(Sight), count, &room)) goto done;
      ((Sight *)sights)[count++] = (Sight){query, region};
    }
  }
  by_query = grouped(sights, sizeof(Sight), count, spans);
  if (by_query == NULL) goto done;
  for (int i = 0; i < 4; i++) {
    found[i] = new_numbers(count);
    if (found[i] == NULL) goto done;
  }
  for (int64_t i = 0; i < count; i++) {
    Box part = box_at(&of_regions, by_query[i].region);
    int64_t first = most(entry(&of[Q_FIRST], by_query[i].query), part.q_begin);
    int64_t last = least(entry(&of[Q_LAST], by_query[i].query), part.q_end - 1);
    numbers_of(found[0])[i] = by_query[i].query;
    numbers_of(found[1])[i] = by_query[i].region;
    numbers_of(found[2])[i] = most(part.k_begin, first - part.hi);
    numbers_of(found[3])[i] = least(part.k_end - 1, last - part.lo);
  }
  result = PyTuple_Pack(4, found[0], found[1], found[2], found[3]);

done:
  for (int i = 0; i < 4; i++) Py_XDECREF(found[i]);
  free(sights);
  free(by_query);
  while (opened) PyBuffer_Release(&of[--opened]);
  PyBuffer_Release(&of_regions);
  return result;
}

/* ---- fold ---- */

/* A tile of a span of queries and one of keys; `pair` is of their ranks. */
typedef struct {
  int64_t pair, sight, query, key;
  Box box;
} Fold;

static int earlier(const void *a, const void *b) {
  const Fold *x = a, *y = b;
  if (x->pair != y->pair) return x->pair < y->pair ? -1 : 1;
  if (x->sight != y->sight) return x->sight < y->sight ? -1 : 1;
  return x->key < y->key ? -1 : x->key > y->key;
}

enum { QUERY = SHARED, REGION, K_START, K_LENGTH, Q_START, Q_LENGTH, Q_ROW, Q_SHARD, FOLD };

/* fold(k_min, k_max, order, start, last, row, shard, query, region, k_start, k_length, q_start, q_length, q_row, q_shard, regions, first,
   ranks): (tiles, their spans of queries, their spans of keys, the pair of ranks of each), by pair, as `Plan._make_tiles` has them of the ranks
   from `first` on. query, region: of each sight; the six behind them are of spans as they are numbered. */
static PyObject *fold_spans(PyObject *self, PyObject *args) {
  PyObject *tiles = NULL, *queries = NULL, *keys = NULL, *pairs = NULL, *result = NULL;
  Py_buffer of[FOLD] = {{0}}, of_regions = {0};
  void *folds = NULL;
  Fold *by_pair = NULL;
  int opened = 0;
  if (!open_arrays(args, FOLD, 3, of, &opened) || !open_table(PyTuple_GET_ITEM(args, FOLD), &of_regions, 8, TILE_COLUMNS)) goto done;
  int64_t first_rank = PyLong_AsLongLong(PyTuple_GET_ITEM(args, FOLD + 1)), ranks = PyLong_AsLongLong(PyTuple_GET_ITEM(args, FOLD + 2));
  if (PyErr_Occurred() || !in_range("ranks", ranks, 1)) goto done;
  int64_t sights = of[QUERY].shape[0], spans = of[ORDER].shape[0], q_spans = of[Q_START].shape[0], room = sights + spans, found = 0;
  const int64_t lengths[FOLD] = {
      sights, sights, spans, spans, spans, spans, spans, sights, sights, spans, spans, q_spans, q_spans, q_spans, q_spans};
  if (!are_sound(of, lengths, FOLD, ranks)) goto done;
  folds = malloc(most(room, 1) * sizeof(Fold));
  if (folds == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  for (int64_t sight = 0; sight < sights; sight++) {
    int64_t query = entry(&of[QUERY], sight), region = entry(&of[REGION], sight), k_max = entry(&of[K_MAX], sight);
    if (query < 0 || query >= q_spans || region < 0 || region >= of_regions.shape[0]) {
      PyErr_SetString(PyExc_ValueError, "a span or a region is not among these");
      goto done;
    }
    int64_t rank = entry(&of[Q_SHARD], query) - first_rank;
    if (rank < 0 || rank >= ranks) {
      PyErr_SetString(PyExc_ValueError, "a rank or a span is not among these");
      goto done;
    }
    Box part = box_at(&of_regions, region);
    int64_t q_start = entry(&of[Q_START], query), q_row = entry(&of[Q_ROW], query);
    int64_t i0 = q_row + most(0, part.q_begin - q_start), i1 = q_row + least(entry(&of[Q_LENGTH], query), part.q_end - q_start);
    for (int64_t at = first_at_least(&of[LAST], entry(&of[K_MIN], sight)); at < spans && entry(&of[START], at) <= k_max; at++) {
      int64_t key = entry(&of[ORDER], at), k_start = entry(&of[K_START], key), k_row = entry(&of[ROW], key);
      int64_t j0 = k_row + most(0, part.k_begin - k_start), j1 = k_row + least(entry(&of[K_LENGTH], key), part.k_end - k_start);
      int64_t shift = q_row - k_row + k_start - q_start;
      Box box = {i0, i1, j0, j1, part.lo + shift, part.hi + shift};
      if (!trimmed(&box)) continue;
      if (!more_room(&folds, sizeof(Fold), found, &room)) goto done;
      ((Fold *)folds)[found++] = (Fold){rank * ranks + entry(&of[SHARD], key), sight, query, key, box};
    }
  }
  by_pair = grouped(folds, sizeof(Fold), found, ranks * ranks);
  if (by_pair == NULL) goto done;
  int sorted = 1;
  for (int64_t i = 1; i < found; i++) sorted &= earlier(&by_pair[i - 1], &by_pair[i]) < 0;
  if (!sorted) qsort(by_pair, found, sizeof(Fold), earlier);
  tiles = new_numbers(TILE_COLUMNS * found);
  queries = new_numbers(found);
  keys = new_numbers(found);
  pairs = new_numbers(found);
  if (tiles == NULL || queries == NULL || keys == NULL || pairs == NULL) goto done;
  int64_t *table = numbers_of(tiles);
  for (int64_t i = 0; i < found; i++, table += TILE_COLUMNS) {
    Box box = by_pair[i].box;
    memcpy(table, (int64_t[TILE_COLUMNS]){box.q_begin, box.q_end, box.k_begin, box.k_end, box.lo, box.hi}, TILE_COLUMNS * sizeof(int64_t));
    numbers_of(queries)[i] = by_pair[i].query;
    numbers_of(keys)[i] = by_pair[i].key;
    numbers_of(pairs)[i] = by_pair[i].pair;
  }
  result = PyTuple_Pack(4, tiles, queries, keys, pairs);

done:
  Py_XDECREF(tiles);
  Py_XDECREF(queries);
  Py_XDECREF(keys);
  Py_XDECREF(pairs);
  free(folds);
  free(by_pair);
  while (opened) PyBuffer_Release(&of[--opened]);
  PyBuffer_Release(&of_regions);
  return result;
}

/* ---- move ---- */

/* move(tiles, apart, ranges, base, stride): the tiles over a buffer that holds an owner's rows in these ranges one after the other from row `base`
   on, as `plan.move_keys`. apart: of each tile. */
static PyObject *move_keys(PyObject *self, PyObject *args) {
  PyObject *tiles, *apart, *ranges, *moved = NULL, *result = NULL;
  Py_buffer of_tiles = {0}, of_apart = {0}, of_ranges = {0};
  int64_t *before = NULL;
  long long base, stride;
  if (!PyArg_ParseTuple(args, "OOOLL", &tiles, &apart, &ranges, &base, &stride)) return NULL;
  if (!in_range("base", base, 0) || !in_range("stride", stride, 1)) return NULL;
  if (!open_table(tiles, &of_tiles, 8, TILE_COLUMNS) || !open_numbers(apart, &of_apart) || !open_table(ranges, &of_ranges, 8, 2)) goto done;
  int64_t count = of_tiles.shape[0], columns = of_tiles.shape[1], some = of_ranges.shape[0], rows = 0;
  if (!have_lengths(&of_apart, &count, 1)) goto done;
  moved = new_numbers(count * columns);
  before = malloc((some + 1) * sizeof(int64_t));
  if (moved == NULL || before == NULL) {
    if (before == NULL) PyErr_NoMemory();
    goto done;
  }
  for (int64_t i = 0; i < some; i++) {
    before[i] = rows;
    rows += number_at(&of_ranges, i, 1) - number_at(&of_ranges, i, 0);
  }
  int64_t *to = numbers_of(moved);
  for (int64_t i = 0; i < count; i++, to += columns) {
    for (int64_t column = 0; column < columns; column++) to[column] = number_at(&of_tiles, i, column);
    int64_t row = to[2] + entry(&of_apart, i);
    /* the last range that begins at the row or before it: an entry of the table is where a range begins */
    int64_t at = first_at_least(&of_ranges, row + 1) - 1;
    if (at < 0 || row >= number_at(&of_ranges, at, 1)) {
      PyErr_SetString(PyExc_ValueError, "a tile's keys are not in these ranges");
      goto done;
    }
    int64_t shift = base + before[at] + row - entry(&of_ranges, at) - to[2];
    to[2] += shift;
    to[3] += shift;
    to[4] -= shift;
    to[5] -= shift;
    if (columns > TILE_COLUMNS + 1) to[TILE_COLUMNS + 1] -= stride * shift;
  }
  Py_INCREF(moved);
  result = moved;

done:
  Py_XDECREF(moved);
  free(before);
  PyBuffer_Release(&of_tiles);
  PyBuffer_Release(&of_apart);
  PyBuffer_Release(&of_ranges);
  return result;
}

static PyMethodDef methods[] = {
    {"count", count_tiles, METH_O, "Live pairs of each tile."},
    {"half", half_of_pairs, METH_VARARGS, "How many of the first keys have half of the live pairs."},
    {"join", join_tiles, METH_O, "Tiles of which wholly live neighbours are joined."},
    {"settle", settle_tiles, METH_VARARGS, "Tiles that have a live pair, with bands within the rows."},
    {"work", work_of_chunks, METH_VARARGS, "Live pairs of the queries of each chunk."},
    {"deal", deal_chunks, METH_VARARGS, "The chunks of each rank."},
    {"fold", fold_spans, METH_VARARGS, "The tiles of ranks, by pairs of a rank and an owner."},
    {"look", look_at_regions, METH_VARARGS, "Which regions spans of queries meet, and the keys that they see there."},
    {"move", move_keys, METH_VARARGS, "Tiles over a buffer that holds an owner's rows."},
    {"part", part_of_keys, METH_VARARGS, "The part of tiles in some rows of keys."},
    {"needs", needed_rows, METH_VARARGS, "The rows of each owner that each rank needs."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ringattn_plans", NULL, -1, methods};

PyMODINIT_FUNC PyInit_ringattn_plans(void) { return PyModule_Create(&definition); }
