"""`hvdtrain.run`: how functions and answers travel. What the caller has stays as it is, what comes back can be told."""

from __future__ import annotations

import pytest
from function_programs import output


def test_classes_of_the_caller_stay_as_they_are(tmp_path):
    output(
        tmp_path,
        """
        import enum
        class Mode(enum.Enum):
            ON = 1
        SCALE, SEEN = 1, []
        class Result:
            made = 0
            def __init__(self, value):
                self.value = value
                Result.made += 1
            def scaled(self):
                SEEN.append(self.value)
                return self.value * SCALE
        class Mine(Exception):
            def where(self):
                return SEEN
        def f():
            return [Result(2) for _ in range(5)], Mode.ON, Result
        def g():
            raise Mine
        before, method = Result(7), Result.scaled
        results, mode, kind = hvdtrain.run(f, np=1)[0]
        SCALE = 10  # as in a notebook's next cell
        assert kind is Result is type(results[0]) and mode is Mode.ON
        assert Result.scaled is method and Result.made == 1, Result.made
        assert [results[0].scaled(), before.scaled(), SEEN] == [20, 70, [2, 7]], SEEN
        try:
            hvdtrain.run(g, np=1, output="none")
        except hvdtrain.LauncherError as error:
            assert type(error.__cause__) is Mine and error.__cause__.where() is SEEN
        """,
    )


@pytest.mark.thorough
def test_what_is_registered_with_keras_is_registered_on_the_ranks(tmp_path):
    output(
        tmp_path,
        """
        os.environ["KERAS_BACKEND"] = "torch"
        import keras
        @keras.saving.register_keras_serializable("mine")
        class Square(keras.layers.Layer):
            def call(self, x):
                return x * x
        @keras.saving.register_keras_serializable("mine")
        def cubed(x):
            return x ** 3
        def model():
            return keras.Sequential([keras.Input((4,)), Square(), keras.layers.Dense(1, activation=cubed)])
        def save(path):
            made = model()
            made.save(path)
            return made
        # neither names a class of the program
        def load(path):
            return len(keras.models.load_model(path).layers)
        made, = hvdtrain.run(save, ("made.keras",), np=1)
        assert type(made.layers[0]) is Square
        assert type(keras.models.load_model("made.keras").layers[0]) is Square
        assert hvdtrain.run(load, ("made.keras",), np=1) == [2]
        """,
    )


def test_what_cannot_be_read_by_the_caller_is_told(tmp_path):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "only_there.py").write_text("class Error(Exception): pass\nclass Answer: pass\n")
    output(
        tmp_path,
        """
        def f(how):
            sys.path.insert(0, "libs")
            import only_there
            if how == "raise":
                raise only_there.Error("at step 7")
            return only_there.Answer()
        class Number:
            def __reduce__(self):
                return int, ("no number",)
        for what, call in (
            ("what rank 0 returned cannot be read here: ModuleNotFoundError: No module", lambda: f("return")),
            ("what it raised cannot be read here: ModuleNotFoundError: No module named", lambda: f("raise")),
            ("Error: at step 7", lambda: f("raise")),
            ("what rank 0 returned cannot be read here: ValueError: invalid literal", Number),
        ):
            try:
                hvdtrain.run(call, np=1, output="none")
            except hvdtrain.LauncherError as error:
                assert what in str(error) and error.__cause__ is None, error
            else:
                raise SystemExit(what)
        """,
    )


def test_what_was_raised_comes_back_whole(tmp_path):
    output(
        tmp_path,
        """
        import asyncio, threading
        class Need(Exception):
            def __init__(self, code, where=""):
                super().__init__(code)
                self.where = where
        class Odd(Exception):  # pickle calls it with its args
            def __init__(self, *, where):
                super().__init__(where)
        def need():
            error = Need(3, "here")
            error.add_note("a note")
            raise error
        def chain():
            try:
                try:
                    raise ValueError(threading.Lock())  # which cannot be pickled
                except ValueError:
                    open("/nowhere")
            except OSError as error:
                raise KeyError("k") from error
        def alone():
            try:
                1 / 0
            except ZeroDivisionError:
                raise KeyError("k") from None
        def context():
            try:
                1 / 0
            finally:
                raise Need(4, "there")
        def raises(error):
            raise error
        def of(function, *args):
            try:
                hvdtrain.run(function, args, np=1, output="none")
            except hvdtrain.LauncherError as error:
                return error.__cause__
        its = of(need)
        assert type(its) is Need and (its.args, its.where, its.__notes__) == ((3,), "here", ["a note"]), repr(its)
        its = of(chain)
        assert type(its) is KeyError and its.__cause__.filename == "/nowhere" and its.__cause__.__context__ is None
        assert its.__suppress_context__
        its = of(alone)
        assert type(its) is KeyError and its.__cause__ is its.__context__ is None
        its = of(context)
        assert type(its.__context__) is ZeroDivisionError and not its.__suppress_context__
        for error in (KeyboardInterrupt(), SystemExit(0), asyncio.CancelledError("c")):
            its = of(raises, error)
            assert type(its) is type(error) and its.args == error.args, repr(its)
        its = of(raises, ExceptionGroup("two", [ValueError(1), Need(5, "w")]))
        assert [type(one) for one in its.exceptions] == [ValueError, Need] and its.exceptions[1].where == "w"
        assert of(raises, ValueError(OSError(2, "no", "file"))).args[0].filename == "file"
        def odd():
            raise Odd(where="here")
        assert of(odd) is None
        """,
    )


def test_what_stands_in_the_program_is_found_by_its_name_on_the_rank(tmp_path):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "beside.py").write_text("VALUE = 5\n")
    output(
        tmp_path,
        """
        import dataclasses, functools, multiprocessing, pickle
        sys.path.remove(os.getcwd())
        sys.path.insert(0, "libs")
        import beside
        @dataclasses.dataclass
        class Config:
            rate: float
        @functools.lru_cache(maxsize=7)
        def fibonacci(n):
            return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
        def square(x):
            return x * x
        def f(config):
            global Made
            class Made:
                pass
            assert type(pickle.loads(pickle.dumps(Made()))) is Made
            with multiprocessing.get_context("fork").Pool(1) as pool:
                squares = pool.map(square, [2, 3])
            return (
                pickle.dumps(config), squares, fibonacci(30), fibonacci.cache_parameters()["maxsize"],
                beside.VALUE,
            )
        data, *others = hvdtrain.run(f, (Config(0.5),), np=1)[0]
        assert pickle.loads(data) == Config(0.5)
        assert others == [[4, 9], 832040, 7, 5], others
        """,
    )


@pytest.mark.thorough
def test_with_processes_that_multiprocessing_spawns(tmp_path):
    """Here they call `hvdtrain.run`, there the function makes them: both have the program as `__mp_main__`."""
    said = output(
        tmp_path,
        """
        import multiprocessing
        class Answer:
            pass
        def square(x):
            return x * x
        def f():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return Answer(), pool.map(square, [2, 3])
        def call():
            answer, squares = hvdtrain.run(f, np=1)[0]
            assert type(answer) is Answer and squares == [4, 9]
            print("SEEN", __name__)
        if __name__ == "__main__":
            call()
            process = multiprocessing.get_context("spawn").Process(target=call)
            process.start()
            process.join()
            assert process.exitcode == 0
        """,
    )
    assert "SEEN __main__" in said and "SEEN __mp_main__" in said


@pytest.mark.parametrize("cell", [False, True], ids=["script", "cell"])
def test_a_traceback_shows_the_callers_lines(tmp_path, cell):
    text = """
    def user_line():
        from hvdtrain.comm.lines import user_line
        return user_line()  # here
    def fail():
        raise ValueError("x")  # there
    where = hvdtrain.run(user_line, np=1)[0]
    assert where.endswith(": return user_line()  # here"), where
    try:
        hvdtrain.run(fail, np=1, output="none")
    except hvdtrain.LauncherError as error:
        print(error)
    """
    if cell:  # as IPython makes one
        name = "<cell 1>"
        text = "import textwrap\ntext = textwrap.dedent('''" + text + "''')\n"
        text += f"import linecache\nlinecache.cache['{name}'] = len(text), None, text.splitlines(True), '{name}'\n"
        text += f"exec(compile(text, '{name}', 'exec'))"
    said = output(tmp_path, text)
    name = "<cell 1>" if cell else str(tmp_path / "train.py")
    assert f'File "{name}", line {6 if cell else 7}, in fail' in said and 'raise ValueError("x")  # there' in said
    assert "function_rank.py" not in said and "dynamic-code" not in said
