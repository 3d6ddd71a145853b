/* Passes tokens from engines to clients in C, as proxy/upstream/fast_forward.py does in Python.
 *
 * An epoll descriptor watches the sockets of engines. `run` reads each ready socket once, checks that the bytes are
 * tokens of the known shape, notes their texts and IDs, and sends the same bytes to the client. It gives all other
 * bytes back, and removes the stream. It never waits.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_READ (64 * 1024)
#define MAX_EVENTS 64
#define MAX_DIGITS 9

typedef struct {
    int engine_fd, client_fd; /* client_fd is a duplicate, because uvloop closes its descriptor before it tells us */
    PyObject *owner;          /* the connection; NULL: the slot is free */
    PyObject *tokens, *texts, *ids, *skips;
    PyObject *head, *between, *behind, *shown_behind; /* bytes; between and shown_behind may be None */
    int hides_ids, least_digits, cut_bytes;
    long index, arrivals;
} Stream;

typedef struct {
    PyObject_HEAD
    int epoll_fd;
    Py_ssize_t count; /* number of slots */
    Stream *streams;
    PyObject *read_text; /* reads a JSON string */
    char in[MAX_READ], out[MAX_READ + 64];
} Pump;

static void clear(Pump *self, Stream *s) {
    PyObject *owned[] = {s->owner, s->tokens, s->texts, s->ids, s->skips, s->head, s->between, s->behind, s->shown_behind};
    epoll_ctl(self->epoll_fd, EPOLL_CTL_DEL, s->engine_fd, NULL);
    if (s->client_fd >= 0) close(s->client_fd);
    s->owner = NULL;
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) Py_XDECREF(owned[i]);
}

/* Sets tokens.index, which only this module changes while the stream is here. */
static int write_index(Stream *s) {
    PyObject *index = PyLong_FromLong(s->index);
    int failed = index == NULL || PyObject_SetAttrString(s->tokens, "index", index) < 0;
    Py_XDECREF(index);
    return failed ? -1 : 0;
}

/* Returns the text of a JSON string without its quotes, or NULL without an exception if it is not valid or empty. */
static PyObject *text_of(Pump *self, const char *text, Py_ssize_t size) {
    int is_plain = size > 0;
    for (Py_ssize_t i = 0; i < size && is_plain; i++)
        is_plain = (unsigned char)text[i] >= 0x20 && text[i] != '"' && text[i] != '\\';
    PyObject *found = NULL;
    if (is_plain) {
        found = PyUnicode_DecodeUTF8(text, size, NULL);
    } else if (size > 0) {
        PyObject *quoted = PyBytes_FromStringAndSize(NULL, size + 2);
        if (quoted != NULL) {
            char *to = PyBytes_AS_STRING(quoted);
            to[0] = to[size + 1] = '"';
            memcpy(to + 1, text, size);
            found = PyObject_CallOneArg(self->read_text, quoted);
            Py_DECREF(quoted);
        }
    }
    if (found == NULL) {
        PyErr_Clear();
    } else if (!PyUnicode_Check(found) || PyUnicode_GET_LENGTH(found) == 0) {
        Py_CLEAR(found);
    }
    return found;
}

/* Passes on the chunk at the beginning of `data`: notes it and appends it to `out`. Returns its size; 0: it is not such
 * a token; -1: an exception. */
static Py_ssize_t pass_chunk(Pump *self, Stream *s, char *data, Py_ssize_t left, Py_ssize_t *out_bytes) {
    Py_ssize_t payload = 0, line = 0;
    for (; line < left && line < 6; line++) {
        int digit = data[line];
        if (digit >= '0' && digit <= '9') digit -= '0';
        else if (digit >= 'a' && digit <= 'f') digit -= 'a' - 10;
        else break;
        payload = payload * 16 + digit;
    }
    Py_ssize_t head_bytes = PyBytes_GET_SIZE(s->head), behind_bytes = PyBytes_GET_SIZE(s->behind);
    Py_ssize_t begin = line + 2 + head_bytes, size = line + 2 + payload + 2;
    if (line == 0 || data[0] == '0' || size > left || data[line] != '\r' || data[line + 1] != '\n' ||
        size < begin + behind_bytes || memcmp(data + line + 2, PyBytes_AS_STRING(s->head), head_bytes) ||
        memcmp(data + size - behind_bytes, PyBytes_AS_STRING(s->behind), behind_bytes))
        return 0;
    Py_ssize_t end = size - behind_bytes, text_end = end;
    long number = 0, digits = 0;
    if (s->between != Py_None) {
        long scale = 1;
        Py_ssize_t between_bytes = PyBytes_GET_SIZE(s->between), at = end - 1;
        for (; at >= begin && data[at] >= '0' && data[at] <= '9' && digits < MAX_DIGITS; at--, digits++, scale *= 10)
            number += (data[at] - '0') * scale;
        text_end = at + 1 - between_bytes;
        if (digits < s->least_digits || (digits > 1 && number * 10 < scale) || text_end <= begin ||
            memcmp(data + text_end, PyBytes_AS_STRING(s->between), between_bytes))
            return 0;
    }
    PyObject *id = NULL, *text = text_of(self, data + begin, text_end - begin);
    if (text == NULL) return 0;
    int failed = 0;
    if (digits) {
        id = PyLong_FromLong(number);
        int is_special = id == NULL ? -1 : PySet_GET_SIZE(s->skips) ? PySet_Contains(s->skips, id) : 0;
        if (is_special) {
            Py_DECREF(text);
            Py_XDECREF(id);
            return is_special < 0 ? -1 : 0;
        }
    }
    if (s->texts != Py_None) {
        failed = PyList_Append(s->texts, text) < 0 || (id != NULL && PyList_Append(s->ids, id) < 0);
    }
    Py_DECREF(text);
    Py_XDECREF(id);
    if (failed) return -1;
    char *to = self->out + *out_bytes;
    Py_ssize_t kept = s->shown_behind == Py_None ? size : s->hides_ids ? end - digits - 1 : end;
    if (s->cut_bytes) { /* the chunk becomes shorter, so its first line changes */
        to += sprintf(to, "%zx\r\n", payload - s->cut_bytes);
        data += line + 2;
        kept -= line + 2;
    }
    memcpy(to, data, kept);
    to += kept;
    if (s->shown_behind != Py_None) {
        if (s->hides_ids) { /* the ID and its brackets become a null of the same length */
            memcpy(to, "null        ", digits + 2);
            to += digits + 2;
        }
        memcpy(to, PyBytes_AS_STRING(s->shown_behind), PyBytes_GET_SIZE(s->shown_behind));
        to += PyBytes_GET_SIZE(s->shown_behind);
    }
    *out_bytes = to - self->out;
    s->arrivals++;
    s->index++;
    if (!(s->index & 6)) { /* the first two of eight tokens measure a gap */
        PyObject *done = write_index(s) < 0 ? NULL : PyObject_CallMethod(s->tokens, s->index & 1 ? "sample" : "begin_gap", NULL);
        if (done == NULL) return -1;
        Py_DECREF(done);
    }
    return size;
}

/* Reads a stream once. If its bytes are not all tokens, or the client does not take them all, the stream leaves, and its
 * connection gets the rest. Returns -1 for an exception. */
static int read_once(Pump *self, Stream *s) {
    Py_ssize_t size = recv(s->engine_fd, self->in, MAX_READ, MSG_DONTWAIT), at = 0, out_bytes = 0, sent = 0;
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    while (at < size) {
        Py_ssize_t passed = pass_chunk(self, s, self->in + at, size - at, &out_bytes);
        if (passed < 0) return -1;
        if (passed == 0) break;
        at += passed;
    }
    if (out_bytes && s->client_fd >= 0) sent = send(s->client_fd, self->out, out_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    else sent = out_bytes;
    if (sent < 0) sent = 0;
    if (sent == out_bytes && at == size && size > 0) return 0;
    if (write_index(s) < 0) return -1;
    PyObject *owner = Py_NewRef(s->owner);
    long arrivals = s->arrivals;
    clear(self, s);
    PyObject *done = PyObject_CallMethod(owner, "take_back_socket", "y#y#l", self->out + sent, out_bytes - sent,
                                         self->in + at, size > at ? size - at : 0, arrivals);
    Py_DECREF(owner);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Reads up to MAX_EVENTS ready streams, and returns their number. The calls to Python may add and remove streams. A
 * removed one that was replaced reads its socket once more. */
static PyObject *pump_run(Pump *self, PyObject *unused) {
    struct epoll_event events[MAX_EVENTS];
    int ready = epoll_wait(self->epoll_fd, events, MAX_EVENTS, 0);
    for (int i = 0; i < ready; i++) {
        Py_ssize_t slot = events[i].data.u32;
        if (self->streams[slot].owner != NULL && read_once(self, &self->streams[slot]) < 0) return NULL;
    }
    return PyLong_FromLong(ready);
}

static PyObject *pump_add(Pump *self, PyObject *args) {
    Stream s = {0};
    int client;
    if (!PyArg_ParseTuple(args, "iiOOOOO!O!OO!Oiii", &s.engine_fd, &client, &s.owner, &s.tokens, &s.texts, &s.ids,
                          &PyFrozenSet_Type, &s.skips, &PyBytes_Type, &s.head, &s.between, &PyBytes_Type, &s.behind,
                          &s.shown_behind, &s.hides_ids, &s.least_digits, &s.cut_bytes))
        return NULL;
    PyObject *index = PyObject_GetAttrString(s.tokens, "index");
    if (index == NULL) return NULL;
    s.index = PyLong_AsLong(index);
    Py_DECREF(index);
    if (s.index == -1 && PyErr_Occurred()) return NULL;
    Py_ssize_t slot = 0;
    while (slot < self->count && self->streams[slot].owner != NULL) slot++;
    if (slot == self->count) {
        Py_ssize_t count = self->count ? 2 * self->count : 16;
        Stream *grown = PyMem_Realloc(self->streams, count * sizeof(Stream));
        if (grown == NULL) return PyErr_NoMemory();
        memset(grown + self->count, 0, (count - self->count) * sizeof(Stream));
        self->streams = grown;
        self->count = count;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (unsigned)slot};
    s.client_fd = client < 0 ? -1 : dup(client);
    if ((client >= 0 && s.client_fd < 0) || epoll_ctl(self->epoll_fd, EPOLL_CTL_ADD, s.engine_fd, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        if (s.client_fd >= 0) close(s.client_fd);
        return NULL;
    }
    PyObject *owned[] = {s.owner, s.tokens, s.texts, s.ids, s.skips, s.head, s.between, s.behind, s.shown_behind};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) Py_INCREF(owned[i]);
    self->streams[slot] = s;
    return PyLong_FromSsize_t(slot);
}

static Stream *slot_of(Pump *self, PyObject *number) {
    Py_ssize_t slot = PyLong_AsSsize_t(number);
    if (slot == -1 && PyErr_Occurred()) return NULL;
    if (slot >= 0 && slot < self->count && self->streams[slot].owner != NULL) return &self->streams[slot];
    PyErr_SetString(PyExc_KeyError, "no such stream");
    return NULL;
}

static PyObject *pump_arrivals(Pump *self, PyObject *number) {
    Stream *s = slot_of(self, number);
    if (s == NULL) return NULL;
    PyObject *arrivals = PyLong_FromLong(s->arrivals);
    s->arrivals = 0;
    return arrivals;
}

static PyObject *pump_remove(Pump *self, PyObject *number) {
    Stream *s = slot_of(self, number);
    if (s == NULL || write_index(s) < 0) return NULL;
    PyObject *arrivals = PyLong_FromLong(s->arrivals);
    clear(self, s);
    return arrivals;
}

static PyObject *pump_fileno(Pump *self, PyObject *unused) { return PyLong_FromLong(self->epoll_fd); }

static PyObject *pump_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *read_text;
    if (!PyArg_ParseTuple(args, "O", &read_text)) return NULL;
    Pump *self = (Pump *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->read_text = Py_NewRef(read_text);
    self->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (self->epoll_fd < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void pump_dealloc(Pump *self) {
    for (Py_ssize_t i = 0; i < self->count; i++)
        if (self->streams[i].owner != NULL) clear(self, &self->streams[i]);
    PyMem_Free(self->streams);
    Py_XDECREF(self->read_text);
    if (self->epoll_fd >= 0) close(self->epoll_fd);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef pump_methods[] = {
    {"fileno", (PyCFunction)pump_fileno, METH_NOARGS, "Return the descriptor that is readable while engines sent bytes."},
    {"run", (PyCFunction)pump_run, METH_NOARGS, "Pass on tokens, and give streams with other bytes back."},
    {"add", (PyCFunction)pump_add, METH_VARARGS, "Watch a stream, and return the number of its slot."},
    {"arrivals", (PyCFunction)pump_arrivals, METH_O, "Return the number of tokens of a slot since the last call."},
    {"remove", (PyCFunction)pump_remove, METH_O, "Stop watching a slot, and return the same number."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject pump_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "proxy.upstream._pump.Pump",
    .tp_basicsize = sizeof(Pump),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = pump_new,
    .tp_dealloc = (destructor)pump_dealloc,
    .tp_methods = pump_methods,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_pump", .m_size = -1};

PyMODINIT_FUNC PyInit__pump(void) {
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyType_Ready(&pump_type) < 0 || PyModule_AddObjectRef(made, "Pump", (PyObject *)&pump_type) < 0)
        return NULL;
    return made;
}
